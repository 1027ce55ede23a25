package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/discovery"
	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/examples"
	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/version"
	"github.com/nametap/nametap/nds"
)

// The demo's client is a pod in this namespace, with the resolv.conf that kubelet writes.
const (
	demoNamespace = "shop"
	demoNdots     = 5
)

// readable is the mode of files that the demo writes.
const readable = 0o644

// A demo is a control plane, an agent and a nameserver in one process.
type demo struct {
	dir          string // holds every file that the demo writes; removed at the end
	out          *printer
	upstream     *fakedns.Server
	controlPlane *discovery.Server
	agent        *agent.Agent
	dnsAddr      string
}

// runDemo starts a demo and shows the tour. If tourOnly is true, it returns after the tour; otherwise it waits until
// ctx ends.
func runDemo(ctx context.Context, out *printer, tourOnly bool) (err error) {
	dir, err := os.MkdirTemp("", "nametap-demo-")
	if err != nil {
		return fmt.Errorf("making a directory for the demo: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	_ = os.Unsetenv("NOTIFY_SOCKET") // the agent is not the service in which the demo may run
	d := &demo{dir: dir, out: out}
	if d.upstream, err = fakedns.Listen(fakedns.Answer(upstreamRecords...)); err != nil {
		return err
	}
	defer d.upstream.Close()
	if _, err := (&stubResolver{server: d.upstream.Addr.String()}).getaddrinfo(ctx, "example."); err != nil {
		return fmt.Errorf("nothing arrives on loopback, which may be down (`ip link set lo up`): %w", err)
	}

	ctx, stop := context.WithCancel(ctx)
	defer stop()
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		defer stop()
		// The user can edit the copy of the example shop.
		if err := errors.Join(os.CopyFS(d.dir, examples.Files), writeResolvConf(d.path("resolv.conf"), d.upstream.Addr.Addr().String())); err != nil {
			return err
		}
		if err := d.start(ctx, group); err != nil {
			return err
		}
		if err := d.tour(ctx); err != nil || tourOnly {
			return err
		}
		d.stayUp(ctx)
		return nil
	})
	return group.Wait()
}

// start starts control plane and agent in group, and returns when the agent answers from a table.
func (d *demo) start(ctx context.Context, group *errgroup.Group) (err error) {
	logger := errorsOnly()
	d.controlPlane, err = discovery.New(discovery.Config{
		ConfigDir: d.path("shop"), Logger: logger, GRPCAddr: "127.0.0.1:0",
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
			Addr: "127.0.0.1:0", Namespace: demoNamespace, Domain: demoNamespace + ".svc.cluster.local",
			Version: "nametap " + version.String(), ID: "demo", // with which doctor knows its agent
			Forward: forward.Config{ResolvConf: d.path("resolv.conf"), Upstreams: []upstream.Spec{{Addr: d.upstream.Addr}}},
		},
		XDS: nds.Config{
			Addr: d.controlPlane.Addr().String(), Plaintext: true, StateDir: d.path("agent"),
			Node: nds.Node{
				PodName: "demo", Namespace: demoNamespace, Domain: demoNamespace + ".svc.cluster.local",
				IPs: []netip.Addr{netip.MustParseAddr("10.244.0.10"), netip.MustParseAddr("fd00:10:244::a")},
			},
		},
		StatusAddr: "127.0.0.1:0",
		SocketDirs: []string{d.path("agent")},
		Logger:     logger,
	}
	if d.agent, err = agent.New(ctx, cfg); err != nil {
		return err
	}
	group.Go(func() error { return d.agent.Run(ctx) })
	if err := await(ctx, d.agent.Ready()); err != nil {
		return err
	}
	d.dnsAddr = d.agent.Proxy().Addrs()[0].Address
	return nil
}

// await waits until ready is closed, or until ctx ends.
func await(ctx context.Context, ready <-chan struct{}) error {
	select {
	case <-ready:
	case <-ctx.Done():
	}
	return ctx.Err()
}

func (d *demo) path(name string) string { return filepath.Join(d.dir, name) }

// writeResolvConf writes a pod's resolv.conf.
func writeResolvConf(path, nameserver string) error {
	text := fmt.Sprintf("nameserver %s\nsearch %s\noptions ndots:%d\n", nameserver, strings.Join(searchList(), " "), demoNdots)
	return os.WriteFile(path, []byte(text), readable)
}

// searchList returns the search list of a pod in the demo's namespace.
func searchList() []string {
	return []string{demoNamespace + ".svc.cluster.local", "svc.cluster.local", "cluster.local"}
}

// A printer writes text with bold and dim parts on a terminal, and plain text to other
// outputs or if NO_COLOR is set.
type printer struct {
	w       io.Writer
	styled  bool
	section int
}

func newPrinter(w io.Writer) *printer {
	p := &printer{w: w}
	if file, ok := w.(*os.File); ok && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb" {
		info, err := file.Stat()
		p.styled = err == nil && info.Mode()&os.ModeCharDevice != 0
	}
	return p
}

// printf prints. It ignores errors: the terminal or the reading program may have ended.
func (p *printer) printf(format string, args ...any) { _, _ = fmt.Fprintf(p.w, format, args...) }

// heading prints the numbered heading of the next section.
func (p *printer) heading(text string) {
	p.section++
	p.printf("\n%s\n", p.bold(fmt.Sprintf("%d. %s", p.section, text)))
}

// detail prints dim text after indent spaces.
func (p *printer) detail(indent int, text string) { p.printf("%*s%s\n", indent, "", p.dim(text)) }

// leftOut prints why this machine cannot show something.
func (p *printer) leftOut(reason string) { p.detail(2, "left out on this machine: "+reason) }

func (p *printer) bold(s string) string { return p.style("1", s) }
func (p *printer) dim(s string) string  { return p.style("2", s) }

func (p *printer) style(code, s string) string {
	if !p.styled {
		return s
	}
	return "\x1b[" + code + "m" + s + "\x1b[0m"
}
