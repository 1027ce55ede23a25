package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sync/errgroup"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/egress"
	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/iptables"
)

// vipsCommand is the first argument of the process that shows connections to VIPs. The second one is
// the directory of the demo that has started it.
const vipsCommand = "vips"

// Ports of the part of the demo that shows connections to VIPs.
const (
	demoEgressPort   = 15054
	demoDatabasePort = 3306
)

// visitTimeout is how long a client may take to reach a database.
const visitTimeout = 10 * time.Second

// A visit is what a client sees that connects to a database by its name.
type visit struct {
	Name     string
	VIP      netip.AddrPort
	Greeting string
}

// visits is what `nametap-demo vips` prints, as JSON.
type visits struct {
	Visits  []visit
	LeftOut string // why there are none: this machine does not allow it
}

// showVIPs shows what a client of an agent with --egress sees.
func (d *demo) showVIPs(ctx context.Context) error {
	d.out.heading("The same databases with --egress: each has a VIP, and connections reach it")
	seen, err := d.visit(ctx)
	if err != nil {
		return err
	}
	if seen.LeftOut != "" {
		d.out.paragraph(2, "left out on this machine: "+seen.LeftOut)
	}
	for _, v := range seen.Visits {
		d.out.printf("  %s port %d\n      %-5s  %s\n", d.out.bold(v.Name), v.VIP.Port(), "A", v.VIP.Addr())
		d.out.paragraph(6, fmt.Sprintf("the server greets: %q", v.Greeting))
	}
	return nil
}

// visit runs `nametap-demo vips` in a network namespace of its own, because capture rules in the
// demo's namespace would concern other programs, too. As root of a user namespace it needs no
// rights.
func (d *demo) visit(ctx context.Context) (seen visits, err error) {
	path, err := os.Executable()
	if err != nil {
		return visits{}, fmt.Errorf("finding the program of the demo: %w", err)
	}
	cmd := exec.CommandContext(ctx, path, vipsCommand, d.dir)
	cmd.Args[0] = os.Args[0]
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET,
		UidMappings: []syscall.SysProcIDMap{{HostID: os.Geteuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{HostID: os.Getegid(), Size: 1}},
	}
	var output, problem bytes.Buffer
	cmd.Stdout, cmd.Stderr = &output, &problem
	err = cmd.Start()
	if errno, ok := errors.AsType[syscall.Errno](err); ok && isForbidden(errno) {
		return visits{LeftOut: fmt.Sprintf("user namespaces are not allowed: %v", errno)}, nil
	}
	if err == nil {
		err = cmd.Wait()
	}
	if err == nil {
		err = json.Unmarshal(output.Bytes(), &seen)
	}
	if ctx.Err() != nil {
		return visits{}, ctx.Err() // the process was killed
	}
	if err != nil {
		return visits{}, fmt.Errorf("connecting to VIPs in a network namespace: %w\n%s", err, &problem)
	}
	return seen, nil
}

// isForbidden reports whether an error of clone(2) means that this machine has or allows no user
// namespaces.
func isForbidden(errno syscall.Errno) bool {
	switch errno {
	case syscall.EPERM, syscall.EACCES, syscall.ENOSPC, syscall.EUSERS, syscall.EINVAL, syscall.ENOSYS:
		return true
	}
	return false
}

// runVIPs is `nametap-demo vips`: a demo whose agent has --capture and --egress, and whose client
// is in a network namespace of its own, like a container. Its child processes end with the process,
// and the rules with its namespace.
func runVIPs(ctx context.Context, dir string) error {
	client, err := newClient(ctx)
	if err == nil {
		err = checkCapture(ctx)
	}
	if reason, ok := errors.AsType[unsupported](err); ok {
		return json.NewEncoder(os.Stdout).Encode(visits{LeftOut: string(reason)})
	}
	if err != nil {
		return err
	}
	d := &demo{dir: dir, out: newPrinter(os.Stderr)}
	if d.upstream, err = fakedns.Listen(fakedns.Answer(upstreamRecords...)); err != nil {
		return err
	}
	seen := visits{Visits: []visit{{Name: demoDatabase1}, {Name: demoDatabase2}}}
	for _, v := range seen.Visits {
		if err := startDatabase(ctx, v.Name); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, visitTimeout)
	defer cancel()
	group, ctx := errgroup.WithContext(ctx)
	if err := d.start(ctx, group, carryVIPs); err != nil {
		return err
	}
	for i := range seen.Visits {
		if err := client.run(func() error { return seen.Visits[i].connect(ctx) }); err != nil {
			return err
		}
	}
	return json.NewEncoder(os.Stdout).Encode(seen)
}

// captureConfig returns a configuration that captures the client's queries and its connections to
// VIPs.
func captureConfig() iptables.Config {
	cfg := iptables.DefaultConfig()
	cfg.AgentUIDs, cfg.AgentGIDs = []uint32{0}, []uint32{0} // the namespace has no others
	cfg.VirtualInterfaces = []string{hostInterface}
	cfg.VIPs, cfg.EgressPort = egress.VIPs(), demoEgressPort
	cfg.IPv6 = iptables.Off
	return cfg
}

// checkCapture returns unsupported if the rules of captureConfig cannot be installed.
func checkCapture(ctx context.Context) error {
	capture, err := iptables.New(captureConfig(), discard())
	if err != nil {
		return err
	}
	for _, f := range capture.Check(ctx) {
		if f.Needed && !f.OK {
			return unsupported(fmt.Sprintf("%s: %s", f.What, f.Detail))
		}
	}
	return nil
}

// carryVIPs changes the configuration of the demo's agent as --capture, --capture-interfaces and
// --egress do.
func carryVIPs(cfg *agent.Config) {
	cfg.DNS.Addr = fmt.Sprintf(":%d", demoDNSPort)
	cfg.XDS.StateDir = "" // the other agent uses it
	cfg.XDS.Node.AutoAllocate = true
	cfg.Capture = &agent.CaptureConfig{On: true, Because: "the demo", Config: captureConfig(), ResolvConf: cfg.DNS.Forward.ResolvConf}
	carried := egress.DefaultConfig()
	carried.Addr = fmt.Sprintf(":%d", demoEgressPort)
	cfg.Egress = &carried
}

// startDatabase starts a server that greets clients at once, on the address of name at the demo's
// nameserver.
func startDatabase(ctx context.Context, name string) error {
	short, _, _ := strings.Cut(name, ".")
	var config net.ListenConfig
	listener, err := config.Listen(ctx, "tcp", netip.AddrPortFrom(databaseAddr(name), demoDatabasePort).String())
	if err != nil {
		return err
	}
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return // the process ends
			}
			_, _ = fmt.Fprintf(conn, "this is %s at %s", short, conn.LocalAddr())
			_ = conn.Close()
		}
	}()
	return nil
}

// databaseAddr returns the address that the demo's nameserver has for a name.
func databaseAddr(name string) netip.Addr {
	for _, text := range upstreamRecords {
		record, err := dns.NewRR(text)
		if a, ok := record.(*dns.A); err == nil && ok && a.Hdr.Name == dns.Fqdn(name) {
			addr, _ := netip.AddrFromSlice(a.A.To4())
			return addr
		}
	}
	return netip.Addr{}
}

// connect queries the name, connects to its address and reads what the server sends.
func (v *visit) connect(ctx context.Context) error {
	answer, err := v.query(ctx)
	if err != nil {
		return err
	}
	for _, record := range answer.Answer {
		if a, ok := record.(*dns.A); ok {
			addr, _ := netip.AddrFromSlice(a.A.To4())
			v.VIP = netip.AddrPortFrom(addr, demoDatabasePort)
		}
	}
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "tcp", v.VIP.String())
	if err != nil {
		return fmt.Errorf("connecting to %s: %w", v.Name, err)
	}
	defer func() { _ = conn.Close() }()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	greeting, err := io.ReadAll(conn)
	if err != nil {
		return fmt.Errorf("reading the greeting of %s: %w", v.Name, err)
	}
	v.Greeting = string(greeting)
	return nil
}

// query queries the client's nameserver for the name. No program listens there, so it repeats the query
// until the capture rules are installed.
func (v *visit) query(ctx context.Context) (*dns.Msg, error) {
	client := dns.Client{Timeout: time.Second}
	for {
		query := new(dns.Msg).SetQuestion(dns.Fqdn(v.Name), dns.TypeA)
		answer, _, err := client.ExchangeContext(ctx, query, net.JoinHostPort(hostAddr, "53"))
		if err == nil {
			return answer, nil
		}
		if ctx.Err() != nil {
			return nil, fmt.Errorf("querying the agent for %s: %w", v.Name, err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}
