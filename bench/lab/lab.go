// Package lab has what a measurement needs: the hosts and the queries, the servers that are
// compared, their processes and namespaces, the load, and the clocks.
//
//   - lab.go: a Lab, with the files, the processes and the control plane of one run;
//   - peers.go, peers_debian.go, forwarders.go: how to start each server; server.go starts it;
//   - hosts.go, mixes.go, check.go: the table of every server, the kinds of queries, and
//     whether the answers are right;
//   - dnsperf.go, resolver.go: two kinds of load;
//   - process.go, procfs.go, measure.go: processes, and what they cost;
//   - netns.go, netspace.go: network namespaces.
package lab

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
	ServerCore = "0"
	ClientCore = "1"
)

// A Lab is a directory with the files that servers read, and the running processes. Only
// one goroutine uses it.
type Lab struct {
	Dir                 string
	Services, Wildcards []Host
	processes           []*Process
	// control is the control plane of the agents; nil before the first of them.
	control *Control
	// agentBinary is the value of -agent, or empty.
	agentBinary string
	// Binaries is the directory of built binaries.
	Binaries string
}

// NewLab makes the directory and the files that all servers share. The caller must close
// the lab.
func NewLab(hosts int, agent, binaries string) (*Lab, error) {
	dir, err := os.MkdirTemp("", "nametap-bench-")
	if err != nil {
		return nil, fmt.Errorf("making a directory: %w", err)
	}
	l := &Lab{Dir: dir, agentBinary: agent, Binaries: cmp.Or(binaries, dir)}
	l.Services, l.Wildcards = makeHosts(hosts)
	files := map[string][]byte{
		"table.pb":    NameTable(l.Services, l.Wildcards),
		"resolv.conf": resolvConf(Address(127, 1)),
	}
	for _, m := range Mixes() {
		files[m.Name+".queries"] = m.queries(l.Services, l.Wildcards)
	}
	for name, content := range files {
		if _, err := l.Write(name, content); err != nil {
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

// Close ends all processes, the last one first, and removes the directory.
func (l *Lab) Close() error {
	for _, p := range slices.Backward(l.processes) {
		p.stop()
	}
	return os.RemoveAll(l.Dir)
}

// Path returns the path of a file of the lab.
func (l *Lab) Path(name string) string { return filepath.Join(l.Dir, name) }

// Write makes a file, and returns its path.
func (l *Lab) Write(name string, content []byte) (string, error) {
	if err := os.WriteFile(l.Path(name), content, 0o600); err != nil {
		return "", fmt.Errorf("writing a file: %w", err)
	}
	return l.Path(name), nil
}

// Start starts a process that Close will stop.
func (l *Lab) Start(ctx context.Context, c Command) (*Process, error) {
	p, err := startProcess(ctx, l.Dir, c)
	if err != nil {
		return nil, err
	}
	l.processes = append(l.processes, p)
	return p, nil
}

// Stop stops a process now.
func (l *Lab) Stop(p *Process) {
	p.stop()
	l.processes = slices.DeleteFunc(l.processes, func(q *Process) bool { return q == p })
}

// Build compiles the command pkg of the module in dir, once, and returns the path
// of the binary.
func (l *Lab) Build(ctx context.Context, dir, pkg string) (string, error) {
	binary := filepath.Join(l.Binaries, "bin-"+filepath.Base(filepath.Join(dir, pkg)))
	if _, err := os.Stat(binary); err == nil {
		return binary, nil
	}
	// Static, like the agent's releases; the C library's resolver is not needed.
	_, err := Output(ctx, "env", "CGO_ENABLED=0", "go", "build", "-C", dir, "-trimpath", "-tags=grpcnotrace,nethttpomithttp2", "-ldflags=-s -w", "-o", binary, "./"+pkg)
	return binary, err
}

// FreeAddr returns a loopback address with a port that is free for UDP and TCP.
func FreeAddr(ctx context.Context) (netip.AddrPort, error) {
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

// A Control is a running control plane.
type Control struct {
	*Process

	Addr netip.AddrPort
	// paths is the process's standard input, lines its standard output.
	paths io.Writer
	lines <-chan string
}

// StartControl starts a control plane without a table. It runs on the remaining processors,
// and its processor time is not counted. options are options of its command line.
func (l *Lab) StartControl(ctx context.Context, options ...string) (*Control, error) {
	binary, err := l.Build(ctx, ".", "ads")
	if err != nil {
		return nil, err
	}
	addr, err := FreeAddr(ctx)
	if err != nil {
		return nil, err
	}
	stdin, paths, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("making a pipe: %w", err)
	}
	defer stdin.Close() // the child holds its own descriptor
	lines := newLineWriter()
	p, err := l.Start(ctx, Command{
		Name: "ads", Argv: append(append([]string{binary}, options...), addr.String()), stdin: stdin, stdout: lines,
	})
	if err != nil {
		return nil, errors.Join(err, paths.Close())
	}
	return &Control{Process: p, Addr: addr, paths: paths, lines: lines.lines}, nil
}

// Expect waits for a line, and fails if another line comes first.
func (c *Control) Expect(ctx context.Context, want string) error {
	limit := time.NewTimer(time.Minute)
	defer limit.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-c.done:
		return c.Alive()
	case <-limit.C:
		return fmt.Errorf("waiting for %q from the control plane: no output for a minute", want)
	case line := <-c.lines:
		if line != want {
			return fmt.Errorf("the control plane writes %q, want %q", line, want)
		}
		return nil
	}
}

// Send sends the table in a file.
func (c *Control) Send(path string) error {
	if _, err := fmt.Fprintln(c.paths, path); err != nil {
		return fmt.Errorf("sending a table: %w", err)
	}
	return nil
}

// Push sends the table in a file and waits for the client's ACK.
func (c *Control) Push(ctx context.Context, path string) error {
	if err := c.Send(path); err != nil {
		return err
	}
	return c.Expect(ctx, "ack")
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
