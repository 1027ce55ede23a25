package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/nametap/nametap/discovery"
	"github.com/nametap/nametap/internal/testkit/fakedns"
)

// The first arguments of the other processes. The second is the directory of the demo, or the resolv.conf of the client.
const (
	capturedCommand = "captured"
	clientCommand   = "client"
)

// The network of `nametap-demo captured`: a host, and a client whose gateway the host is, like a container.
const (
	hostInterface  = "demo0"
	hostAddr       = "10.244.0.1"
	clientAddr     = "10.244.0.10"
	nameserverAddr = "10.96.0.10"
	databasePort   = "3306"
)

// patience is how long a machine may take for an answer, or to show capture, before the demo fails.
const patience = 10 * time.Minute

// showCapture runs `nametap-demo captured` in a network namespace of its own, because rules in the demo's namespace
// would concern other programs, too. A user who is not root gets the right to it by a user namespace.
func (d *demo) showCapture(ctx context.Context) error {
	d.out.heading("Capture: the nameserver of a client's resolv.conf is " + nameserverAddr + ", port 53")
	if missing := missingPrograms(); missing != "" {
		d.out.leftOut(missing)
		return nil
	}
	cmd := self(ctx, capturedCommand, d.dir)
	cmd.Stdout = os.Stdout
	cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWNET
	if os.Geteuid() != 0 {
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{HostID: os.Geteuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{HostID: os.Getegid(), Size: 1}}
	}
	if err := cmd.Start(); err != nil { // the program runs already, so the kernel refuses the namespace
		errno, _ := errors.AsType[syscall.Errno](err)
		d.out.leftOut(fmt.Sprintf("no network namespace (%v): run `make run` as root, in a container with SYS_ADMIN", errno))
		return ctx.Err()
	}
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("showing capture in a network namespace: %w", err)
	}
	return nil
}

// self returns a command that runs this program, and ends with it.
func self(ctx context.Context, arguments ...string) *exec.Cmd {
	path, _ := os.Executable() // without a path, the command cannot be started
	cmd := exec.CommandContext(ctx, path, arguments...)
	cmd.Args[0], cmd.Stderr = os.Args[0], os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd
}

// missingPrograms says what to install before capture can be shown. It is empty if nothing is missing.
func missingPrograms() string {
	// Distributions have the tools in these directories, which may be missing from the user's PATH.
	_ = os.Setenv("PATH", os.Getenv("PATH")+":/usr/sbin:/sbin") // the name is valid
	for _, p := range [][2]string{
		{nametapPath(), "run `make run`, which builds it"}, {"iptables-save", "install iptables"}, {"ip", "install iproute2"},
	} {
		if _, err := exec.LookPath(p[0]); err != nil {
			return filepath.Base(p[0]) + " is missing: " + p[1]
		}
	}
	return ""
}

// nametapPath returns the path of the program nametap, which is built beside this program.
func nametapPath() string {
	path, _ := os.Executable() // without a path, the program is missing
	return filepath.Join(filepath.Dir(path), "nametap")
}

// A host has a nameserver, a control plane and an agent. It runs in a network namespace.
type host struct {
	dir    string // of the demo
	out    *printer
	client *client
}

// runCaptured is `nametap-demo captured`.
func runCaptured(ctx context.Context, out *printer, dir string) error {
	interfaces, err := net.Interfaces()
	if err != nil || len(interfaces) != 1 || interfaces[0].Flags&(net.FlagLoopback|net.FlagUp) != net.FlagLoopback {
		return errors.Join(err, fmt.Errorf("%s: want a new network namespace: run nametap-demo without arguments", capturedCommand))
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	group, ctx := errgroup.WithContext(ctx)
	h := &host{dir: dir, out: out}
	if err := h.start(ctx, group); err != nil {
		reason, _, _ := strings.Cut(err.Error(), "\n")
		out.leftOut(fmt.Sprintf("no host in a network namespace (%s): run `make run` as root, in a container with NET_ADMIN", reason))
		return ctx.Err()
	}
	if err := h.nametap(ctx, "capture", "check").Run(); err != nil {
		out.leftOut("no rules can be installed: `nametap capture check`, as root, says what is missing")
		return ctx.Err()
	}
	return h.show(ctx)
}

func (h *host) path(name string) string { return filepath.Join(h.dir, capturedCommand, name) }

// start starts everything but an agent.
func (h *host) start(ctx context.Context, group *errgroup.Group) error {
	if err := cmp.Or(
		ip(ctx, "link set lo up",
			"address add "+nameserverAddr+" dev lo", "address add "+demoAddress1+" dev lo", "address add "+demoAddress2+" dev lo"),
		os.MkdirAll(h.path("state"), 0o755), //nolint:gosec // nothing in it is secret
		writeResolvConf(h.path("resolv.conf"), nameserverAddr),
		h.setSwitch("false"),
	); err != nil {
		return err
	}
	server := netip.AddrPortFrom(netip.MustParseAddr(nameserverAddr), 53)
	if _, err := fakedns.Listen(fakedns.Answer(upstreamRecords...), fakedns.On(server)); err != nil {
		return err
	}
	controlPlane, err := discovery.New(discovery.Config{
		ConfigDir: filepath.Join(h.dir, "shop"), GRPCAddr: "127.0.0.1:15010", Logger: errorsOnly(),
	})
	if err != nil {
		return err
	}
	group.Go(func() error { return controlPlane.Run(ctx) })
	if err := await(ctx, controlPlane.Ready()); err != nil {
		return err
	}
	h.client, err = startClient(ctx, h.path("resolv.conf"))
	return errors.Join(err, startDatabase(ctx, demoDatabase1, demoAddress1), startDatabase(ctx, demoDatabase2, demoAddress2))
}

// nametap returns the command nametap with settings of this host, as uid 0, which may be that of a user namespace.
func (h *host) nametap(ctx context.Context, arguments ...string) *exec.Cmd {
	arguments = append(arguments, "--xds-addr=127.0.0.1:15010", "--xds-plaintext", "--namespace="+demoNamespace,
		"--instance-ip="+clientAddr, "--dns-addr=0.0.0.0:15053", "--status-addr=127.0.0.1:15020", "--egress-addr=0.0.0.0:15054",
		"--state-dir="+h.path("state"), "--mesh-config="+h.path("mesh"), "--resolv-conf="+h.path("resolv.conf"),
		"--capture-agent-uid=0", "--capture-agent-gid=0", "--capture-virtual-interface="+hostInterface,
		"--capture-resolved=false", "--log-level=error")
	cmd := exec.CommandContext(ctx, nametapPath(), arguments...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "RUNTIME_DIRECTORY=" + h.path("state")}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd
}

// show shows an agent that installs the rules itself, as on a VM, without and with capture.
func (h *host) show(ctx context.Context) error {
	var ended sync.WaitGroup
	defer ended.Wait()
	running, end := context.WithCancelCause(ctx)
	defer end(nil)
	agent := h.nametap(running, "agent", "--capture", "--egress")
	agent.Stderr = os.Stderr
	if err := agent.Start(); err != nil {
		return fmt.Errorf("starting the agent: %w", err)
	}
	ended.Go(func() { end(fmt.Errorf("the agent has ended: %w", agent.Wait())) })
	// After an error, running has ended, so the other steps end at once.
	return errors.Join(
		h.look(running, "`nametap agent --capture --egress`, ISTIO_META_DNS_CAPTURE: \"false\"", notFound),
		h.setSwitch("true"),
		h.look(running, "the mesh config changes to ISTIO_META_DNS_CAPTURE: \"true\"", demoOldAddress),
		h.ask(running, "visit", demoDatabase1, greeting(demoDatabase1)),
		h.ask(running, "visit", demoDatabase2, greeting(demoDatabase2)))
}

// setSwitch sets the switch of capture in the mesh config.
func (h *host) setSwitch(on string) error {
	text := fmt.Sprintf("defaultConfig:\n  proxyMetadata:\n    ISTIO_META_DNS_CAPTURE: %q\n", on)
	return os.WriteFile(h.path("mesh"), []byte(text), readable)
}

// look makes the client resolve a host of the mesh, until the result is service, and another name.
func (h *host) look(ctx context.Context, title, service string) error {
	h.out.printf("  %s\n", h.out.bold(title))
	return errors.Join(h.ask(ctx, "resolve", demoService, service), h.ask(ctx, "resolve", demoOutside, demoOutsideAddrs))
}

// ask makes the client do something with a name until the result ends with want, and shows the result.
func (h *host) ask(ctx context.Context, action, name, want string) error {
	for {
		result, err := h.client.do(action, name)
		switch {
		case err != nil:
			return errors.Join(err, context.Cause(ctx))
		case strings.HasSuffix(result, want):
			h.out.detail(6, name+": "+result)
			return nil
		case ctx.Err() != nil:
			return fmt.Errorf("the client gets %q from %s, want %q: %w", result, name, want, context.Cause(ctx))
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// startDatabase starts a server that greets clients at once.
func startDatabase(ctx context.Context, name, addr string) error {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", net.JoinHostPort(addr, databasePort))
	if err != nil {
		return err
	}
	go func() {
		for conn, err := listener.Accept(); err == nil; conn, err = listener.Accept() {
			_, _ = fmt.Fprint(conn, greeting(name)) // the client sees what is missing
			_ = conn.Close()
		}
	}()
	return nil
}

func greeting(name string) string {
	short, _, _ := strings.Cut(name, ".")
	return "this is " + short
}

// errorsOnly is a log that keeps the tour readable.
func errorsOnly() *slog.Logger {
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError}))
}
