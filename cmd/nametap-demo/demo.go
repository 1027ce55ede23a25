package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sync/errgroup"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/discovery"
	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/examples"
	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/nds"
)

// The demo's client is a pod in this namespace, with the resolv.conf that kubelet writes.
const (
	demoNamespace = "shop"
	demoNdots     = 5
)

// The ports that the demo uses if they are free.
const (
	demoDNSPort    = 15053
	demoStatusPort = 15020
)

// A demo is a control plane, an agent and a nameserver in one process.
type demo struct {
	dir          string // holds every file that the demo writes; removed at the end
	stateDir     string // of the control plane; empty for none
	out          *printer
	upstream     *fakedns.Server
	controlPlane *discovery.Server
	agent        *agent.Agent
	dnsAddr      string
}

// runDemo starts a demo and shows the tour. It then returns if once is set, and waits until
// ctx ends otherwise.
func runDemo(ctx context.Context, out *printer, once bool) (err error) {
	dir, err := os.MkdirTemp("", "nametap-demo-")
	if err != nil {
		return fmt.Errorf("making a directory for the demo: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	d := &demo{dir: dir, stateDir: filepath.Join(dir, "discovery"), out: out}
	if d.upstream, err = fakedns.Listen(fakedns.Answer(upstreamRecords...)); err != nil {
		return err
	}
	defer d.upstream.Close()

	ctx, stop := context.WithCancel(ctx)
	defer stop()
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		defer stop()
		if err := d.unpack(); err != nil {
			return err
		}
		if err := d.start(ctx, group, func(*agent.Config) {}); err != nil {
			return err
		}
		if err := d.tour(ctx); err != nil {
			return err
		}
		if !once {
			d.stayUp(ctx)
		}
		return nil
	})
	if err := group.Wait(); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// start starts control plane and agent in group, and returns when the agent answers from a
// table. change changes the configuration of the agent.
func (d *demo) start(ctx context.Context, group *errgroup.Group, change func(*agent.Config)) error {
	// Control plane and agent log errors only, so that the tour stays readable.
	logger := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError}))
	var err error
	d.controlPlane, err = discovery.New(discovery.Config{
		ConfigDir: d.path("shop"), StateDir: d.stateDir, Logger: logger, GRPCAddr: "127.0.0.1:0",
	})
	if err != nil {
		return err
	}
	group.Go(func() error { return d.controlPlane.Run(ctx) })
	if err := await(ctx, d.controlPlane.Ready()); err != nil {
		return err
	}
	cfg := agent.Config{
		DNS: dnsproxy.Config{
			Namespace: demoNamespace, Domain: demoNamespace + ".svc.cluster.local",
			Forward: forward.Config{ResolvConf: d.path("resolv.conf"), Upstreams: []upstream.Spec{{Addr: d.upstream.Addr}}},
		},
		XDS: nds.Config{
			Addr: d.controlPlane.Addr().String(), Plaintext: true, StateDir: d.path("agent"),
			Node: nds.Node{
				PodName: "demo", Namespace: demoNamespace, Domain: demoNamespace + ".svc.cluster.local",
				IPs: []netip.Addr{netip.MustParseAddr("10.244.0.10"), netip.MustParseAddr("fd00:10:244::a")},
			},
		},
		SocketDirs: []string{d.path("agent")},
		Logger:     logger,
	}
	change(&cfg)
	if cfg.DNS.Addr == "" {
		if cfg.DNS.Addr, cfg.DNS.Sockets, err = d.dnsSockets(); err != nil {
			return err
		}
	}
	err = untilFree(func() (err error) {
		cfg.StatusAddr = d.freeStatus(ctx)
		d.agent, err = agent.New(ctx, cfg)
		return err
	})
	if err != nil {
		return err
	}
	group.Go(func() error { return d.agent.Run(ctx) })
	if err := await(ctx, d.agent.Ready()); err != nil {
		return err
	}
	d.dnsAddr = d.agent.Proxy().Addrs()[0].Address
	return nil
}

// await waits for ready or for the end of ctx.
func await(ctx context.Context, ready <-chan struct{}) error {
	select {
	case <-ready:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (d *demo) path(name string) string { return filepath.Join(d.dir, name) }

// unpack writes a copy of the example shop, which the user can edit, and a pod's resolv.conf.
func (d *demo) unpack() error {
	const readable = 0o644
	err := fs.WalkDir(examples.Files, ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() {
			return os.MkdirAll(d.path(path), 0o755)
		}
		text, err := fs.ReadFile(examples.Files, path)
		if err != nil {
			return err
		}
		return os.WriteFile(d.path(path), text, readable)
	})
	if err != nil {
		return fmt.Errorf("unpacking the examples: %w", err)
	}
	resolvConf := fmt.Sprintf("nameserver %s\nsearch %s\noptions ndots:%d\n",
		d.upstream.Addr.Addr(), strings.Join(searchList(), " "), demoNdots)
	if err := os.WriteFile(d.path("resolv.conf"), []byte(resolvConf), readable); err != nil {
		return fmt.Errorf("writing the demo's resolv.conf: %w", err)
	}
	return nil
}

// searchList returns the search list of a pod in the demo's namespace.
func searchList() []string {
	return []string{demoNamespace + ".svc.cluster.local", "svc.cluster.local", "cluster.local"}
}

// untilFree calls open again while another program takes a port that has just been free.
func untilFree(open func() error) error {
	const attempts = 5
	var err error
	for range attempts {
		if err = open(); !errors.Is(err, syscall.EADDRINUSE) {
			break
		}
	}
	return err
}

// freeStatus returns the usual address for the status. If that is taken, it prints so and returns
// an address with port 0.
func (d *demo) freeStatus(ctx context.Context) string {
	var config net.ListenConfig
	address := net.JoinHostPort("127.0.0.1", strconv.Itoa(demoStatusPort))
	listener, err := config.Listen(ctx, "tcp", address)
	if err == nil {
		_ = listener.Close() // nothing was accepted
		return address
	}
	d.printTaken("status", demoStatusPort)
	return "127.0.0.1:0"
}

// dnsSockets opens the agent's sockets on loopback, which opens its own only when it runs. If
// their port is taken, it prints so and uses another one.
func (d *demo) dnsSockets() (address string, sockets []*os.File, err error) {
	address, sockets, err = listenDNS(demoDNSPort)
	if errors.Is(err, syscall.EADDRINUSE) {
		d.printTaken("DNS", demoDNSPort)
		err = untilFree(func() (err error) {
			address, sockets, err = listenDNS(0)
			return err
		})
	}
	return address, sockets, err
}

// listenDNS opens a UDP and a TCP socket with one port, any free one if it is 0.
func listenDNS(port int) (address string, sockets []*os.File, err error) {
	tcp, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: port})
	if err != nil {
		return "", nil, err
	}
	defer tcp.Close()
	address = tcp.Addr().String()
	udp, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.MustParseAddrPort(address)))
	if err != nil {
		return "", nil, err
	}
	defer udp.Close()
	tcpFile, tcpErr := tcp.File()
	udpFile, udpErr := udp.File()
	return address, []*os.File{udpFile, tcpFile}, errors.Join(tcpErr, udpErr)
}

func (d *demo) printTaken(what string, port int) {
	d.out.printf("(%s: port %d is in use, so the demo uses a free one)\n", what, port)
}
