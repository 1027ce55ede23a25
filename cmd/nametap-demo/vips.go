package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sync/errgroup"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/egress"
	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/iptables"
)

// vipsCommand is the first argument of the process that shows connections to VIPs. The second argument
// is the directory of the demo that has started the process.
const vipsCommand = "vips"

// Ports of the part of the demo that shows connections to VIPs.
const (
	demoEgressPort   = 15054
	demoDatabasePort = "3306"
)

// visitTimeout is how long it may take to reach the databases.
const visitTimeout = 10 * time.Second

// showVIPs shows what a client of an agent with --egress sees. It runs `nametap-demo vips` in a network
// namespace of its own, because capture rules in the demo's namespace would concern other programs,
// too. The command is root in a user namespace of its own, so the user of the demo needs no rights.
func (d *demo) showVIPs(ctx context.Context) error {
	d.out.heading("The same databases with --egress: each has a VIP, and connections reach it")
	path, err := os.Executable()
	if err != nil {
		return fmt.Errorf("finding the program of the demo: %w", err)
	}
	cmd := exec.CommandContext(ctx, path, vipsCommand, d.dir)
	cmd.Args[0] = os.Args[0]
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET,
		UidMappings: []syscall.SysProcIDMap{{HostID: os.Geteuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{HostID: os.Getegid(), Size: 1}},
	}
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	err = cmd.Run()
	switch errno, isErrno := errors.AsType[syscall.Errno](err); {
	case ctx.Err() != nil:
		return ctx.Err() // the process was killed
	case isErrno && isForbidden(errno):
		d.leftOut("user namespaces are not allowed: " + errno.Error())
	case err != nil:
		return fmt.Errorf("connecting to VIPs in a network namespace: %w", err)
	}
	return nil
}

// leftOut prints why this machine cannot show connections to VIPs.
func (d *demo) leftOut(reason string) { d.out.paragraph(2, "left out on this machine: "+reason) }

// isForbidden reports whether an error of clone(2) means that this machine has or allows no user
// namespaces.
func isForbidden(errno syscall.Errno) bool {
	switch errno {
	case syscall.EPERM, syscall.EACCES, syscall.ENOSPC, syscall.EUSERS, syscall.EINVAL, syscall.ENOSYS:
		return true
	}
	return false
}

// runVIPs is `nametap-demo vips`: a demo whose agent has --capture and --egress, and whose client is in a network
// namespace of its own, like a container.
func runVIPs(ctx context.Context, out *printer, dir string) error {
	interfaces, err := net.Interfaces()
	switch {
	case err != nil:
		return fmt.Errorf("listing interfaces: %w", err)
	case len(interfaces) != 1 || interfaces[0].Flags&(net.FlagLoopback|net.FlagUp) != net.FlagLoopback:
		return fmt.Errorf("%s: want a new network namespace, which the demo makes; run nametap-demo without arguments",
			vipsCommand)
	}
	d := &demo{dir: dir, out: out}
	client, err := setUp(ctx)
	if err != nil {
		d.leftOut(err.Error())
		return nil
	}
	if d.upstream, err = fakedns.Listen(fakedns.Answer(upstreamRecords...)); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, visitTimeout)
	defer cancel()
	group, ctx := errgroup.WithContext(ctx)
	if err := d.start(ctx, group, carryVIPs); err != nil {
		return err
	}
	return client.run(func() error { return errors.Join(d.visit(ctx, demoDatabase1), d.visit(ctx, demoDatabase2)) })
}

// setUp makes the client and starts the databases. An error says what this machine lacks.
func setUp(ctx context.Context) (*client, error) {
	// Distributions have the tools in these directories, which may be missing from the user's PATH.
	if err := os.Setenv("PATH", os.Getenv("PATH")+":/usr/sbin:/sbin"); err != nil {
		return nil, err
	}
	c, err := newClient(ctx)
	if err != nil {
		return nil, err
	}
	capture, err := iptables.New(captureConfig(), slog.New(slog.DiscardHandler))
	if err != nil {
		return nil, err
	}
	for _, f := range capture.Check(ctx) {
		if f.Needed && !f.OK {
			return nil, fmt.Errorf("%s: %s", f.What, f.Detail)
		}
	}
	return c, errors.Join(startDatabase(ctx, demoDatabase1, demoAddress1), startDatabase(ctx, demoDatabase2, demoAddress2))
}

// captureConfig returns a configuration that captures the client's queries and its connections to VIPs.
func captureConfig() iptables.Config {
	cfg := iptables.DefaultConfig()
	cfg.AgentUIDs, cfg.AgentGIDs = []uint32{0}, []uint32{0} // the user namespace has only root
	cfg.VirtualInterfaces = []string{hostInterface}
	cfg.VIPs, cfg.EgressPort = egress.VIPs(), demoEgressPort
	cfg.Only = family.IPv4
	return cfg
}

// carryVIPs changes the configuration of the demo's agent as --capture, --capture-virtual-interface and --egress do.
func carryVIPs(cfg *agent.Config) {
	cfg.DNS.Addr = ":15053" // the client's gateway is the agent's host
	cfg.XDS.StateDir = ""   // the agent of the process that has started this one uses it
	cfg.XDS.Node.AutoAllocate = true
	cfg.Capture = &agent.CaptureConfig{
		On: true, Because: "the demo", Config: captureConfig(), ResolvConf: cfg.DNS.Forward.ResolvConf,
	}
	carried := egress.DefaultConfig()
	carried.Addr = fmt.Sprintf(":%d", demoEgressPort)
	cfg.Egress = &carried
}

// startDatabase starts a server that greets clients at once.
func startDatabase(ctx context.Context, name, addr string) error {
	short, _, _ := strings.Cut(name, ".")
	var config net.ListenConfig
	listener, err := config.Listen(ctx, "tcp", net.JoinHostPort(addr, demoDatabasePort))
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

// visit resolves a name, connects to its address and shows what the server sends.
func (d *demo) visit(ctx context.Context, name string) error {
	addr, err := awaitAddress(ctx, name)
	if err != nil {
		return err
	}
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "tcp", net.JoinHostPort(addr, demoDatabasePort))
	if err != nil {
		return fmt.Errorf("connecting to %s: %w", name, err)
	}
	defer func() { _ = conn.Close() }()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	greeting, err := io.ReadAll(conn)
	if err != nil {
		return fmt.Errorf("reading the greeting of %s: %w", name, err)
	}
	d.out.printf("  %s port %s\n      %-5s  %s\n", d.out.bold(name), demoDatabasePort, "A", addr)
	d.out.paragraph(6, fmt.Sprintf("the server greets: %q", greeting))
	return nil
}

// awaitAddress queries the client's nameserver for a name. No program listens at the address of that nameserver. So
// awaitAddress repeats the query until the capture rules redirect the query to the agent.
func awaitAddress(ctx context.Context, name string) (string, error) {
	resolver := stubResolver{server: net.JoinHostPort(hostAddr, "53")}
	for {
		addrs, err := resolver.lookup(ctx, dns.Fqdn(name), dns.TypeA)
		switch {
		case err == nil && len(addrs) > 0:
			return addrs[0], nil
		case ctx.Err() != nil:
			return "", fmt.Errorf("querying the agent for %s: %w", name, errors.Join(ctx.Err(), err))
		}
		time.Sleep(10 * time.Millisecond)
	}
}
