package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// The processors of a saturated run: one for the server, one for dnsperf.
const (
	serverCore = "0"
	clientCore = "1"
)

// A lab is a directory with the files that servers read, and the running processes. Only
// one goroutine uses it.
type lab struct {
	dir                 string
	services, wildcards []host
	processes           []*process
	// control is the control plane of the agents; nil before the first of them.
	control *control
	// agentBinary is the value of -agent, or empty.
	agentBinary string
	// binaries is the directory of built binaries.
	binaries string
}

// newLab makes the directory and the files that all servers share. The caller must close
// the lab.
func newLab(hosts int, o options) (*lab, error) {
	dir, err := os.MkdirTemp("", "nametap-bench-")
	if err != nil {
		return nil, fmt.Errorf("making a directory: %w", err)
	}
	l := &lab{dir: dir, agentBinary: o.agent, binaries: cmp.Or(o.inside, dir)}
	l.services, l.wildcards = makeHosts(hosts)
	files := map[string][]byte{
		"table.pb":    nameTable(l.services, l.wildcards),
		"resolv.conf": resolvConf(address(127, 1)),
	}
	for _, m := range mixes() {
		files[m.name+".queries"] = m.queries(l.services, l.wildcards)
	}
	for name, content := range files {
		if _, err := l.write(name, content); err != nil {
			return nil, errors.Join(err, os.RemoveAll(dir))
		}
	}
	return l, nil
}

// resolvConf returns the resolv.conf of a pod, with these nameservers.
func resolvConf(nameservers ...netip.Addr) []byte {
	text := []byte("search " + strings.Join(searchList(), " ") + "\noptions ndots:5\n")
	for _, server := range nameservers {
		text = fmt.Appendf(text, "nameserver %s\n", server)
	}
	return text
}

// close ends all processes, the last one first, and removes the directory.
func (l *lab) close() error {
	for _, p := range slices.Backward(l.processes) {
		p.stop()
	}
	return os.RemoveAll(l.dir)
}

// path returns the path of a file of the lab.
func (l *lab) path(name string) string { return filepath.Join(l.dir, name) }

// write makes a file, and returns its path.
func (l *lab) write(name string, content []byte) (string, error) {
	if err := os.WriteFile(l.path(name), content, 0o600); err != nil {
		return "", fmt.Errorf("writing a file: %w", err)
	}
	return l.path(name), nil
}

// start starts a process that close will stop.
func (l *lab) start(ctx context.Context, c command) (*process, error) {
	p, err := startProcess(ctx, l.dir, c)
	if err != nil {
		return nil, err
	}
	l.processes = append(l.processes, p)
	return p, nil
}

// stop stops a process now.
func (l *lab) stop(p *process) {
	p.stop()
	l.processes = slices.DeleteFunc(l.processes, func(q *process) bool { return q == p })
}

// build compiles the command pkg of the module in dir, once, and returns the path
// of the binary.
func (l *lab) build(ctx context.Context, dir, pkg string) (string, error) {
	binary := filepath.Join(l.binaries, "bin-"+filepath.Base(filepath.Join(dir, pkg)))
	if _, err := os.Stat(binary); err == nil {
		return binary, nil
	}
	// Static, like the agent's releases; the C library's resolver is not needed.
	_, err := output(ctx, "env", "CGO_ENABLED=0", "go", "build", "-C", dir, "-trimpath", "-tags=grpcnotrace", "-ldflags=-s -w", "-o", binary, "./"+pkg)
	return binary, err
}

// freeAddr returns a loopback address with a port that is free for UDP and TCP.
func freeAddr(ctx context.Context) (netip.AddrPort, error) {
	var listen net.ListenConfig
	for range 50 {
		tcp, err := listen.Listen(ctx, "tcp4", "127.0.0.1:0")
		if err != nil {
			return netip.AddrPort{}, fmt.Errorf("looking for a free port: %w", err)
		}
		addr := tcp.Addr().String()
		udp, err := listen.ListenPacket(ctx, "udp4", addr)
		if err == nil {
			err = udp.Close()
		}
		if err := errors.Join(err, tcp.Close()); err == nil {
			return netip.ParseAddrPort(addr)
		}
	}
	return netip.AddrPort{}, errors.New("no port is free for both UDP and TCP")
}

// A control is a running control plane.
type control struct {
	*process

	addr netip.AddrPort
	// paths is its standard input, lines its standard output.
	paths io.Writer
	lines <-chan string
}

// startControl starts a control plane without a table. It runs on the remaining processors,
// and its processor time is not counted.
func (l *lab) startControl(ctx context.Context) (*control, error) {
	binary, err := l.build(ctx, ".", "ads")
	if err != nil {
		return nil, err
	}
	addr, err := freeAddr(ctx)
	if err != nil {
		return nil, err
	}
	stdin, paths, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("making a pipe: %w", err)
	}
	defer stdin.Close() // the child holds its own descriptor
	lines := newLineWriter()
	p, err := l.start(ctx, command{
		name: "ads", argv: []string{binary, addr.String()}, stdin: stdin, stdout: lines,
	})
	if err != nil {
		return nil, errors.Join(err, paths.Close())
	}
	return &control{process: p, addr: addr, paths: paths, lines: lines.lines}, nil
}

// expect waits for a line, and fails if another line comes first.
func (c *control) expect(ctx context.Context, want string) error {
	limit := time.NewTimer(time.Minute)
	defer limit.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-c.done:
		return c.alive()
	case <-limit.C:
		return fmt.Errorf("waiting for %q from the control plane: no output for a minute", want)
	case line := <-c.lines:
		if line != want {
			return fmt.Errorf("the control plane writes %q, want %q", line, want)
		}
		return nil
	}
}

// send sends the table in a file.
func (c *control) send(path string) error {
	if _, err := fmt.Fprintln(c.paths, path); err != nil {
		return fmt.Errorf("sending a table: %w", err)
	}
	return nil
}

// push sends the table in a file and waits for the client's ACK.
func (c *control) push(ctx context.Context, path string) error {
	if err := c.send(path); err != nil {
		return err
	}
	return c.expect(ctx, "ack")
}

// A lineWriter sends the lines that are written to it to a channel.
type lineWriter struct {
	lines chan string
	rest  string
}

func newLineWriter() *lineWriter { return &lineWriter{lines: make(chan string, 1000)} }

// Write adds output. It drops lines while the channel is full.
func (w *lineWriter) Write(b []byte) (int, error) {
	text := w.rest + string(b)
	for {
		line, rest, ok := strings.Cut(text, "\n")
		if !ok {
			w.rest = text
			return len(b), nil
		}
		select {
		case w.lines <- line:
		default:
		}
		text = rest
	}
}
