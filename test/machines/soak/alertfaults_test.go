package soak

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/fakexds"
	"github.com/nametap/nametap/internal/testkit/netns"
)

const (
	istiod   = "istiod.istio-system.svc"
	identity = "spiffe://cluster.local/ns/soak/sa/default"
	token    = "token-1"
)

// A fault is what is wrong with one agent.
type fault struct {
	name   string
	alerts []string // that fire
	// late returns how long it takes from the beginning of the fault until something is wrong; nil means no time.
	late func(f *fleet) time.Duration
	// prepare is called before the agent starts, begin when it runs, end at the end of the fault; each may be nil. Without
	// begin the agent starts with the fault.
	prepare, begin, end func(a *alertAgent)

	agent *alertAgent
	began time.Time
}

func (f *fault) delay(fleet *fleet) time.Duration {
	if f.late == nil {
		return 0
	}
	return f.late(fleet)
}

// faults returns the faults, and an agent without one.
func faults() []fault {
	return []fault{
		{name: "healthy"},
		{
			name: "killed", alerts: []string{"NametapDown"},
			begin: func(a *alertAgent) { a.service.stop(syscall.SIGKILL) },
			end:   func(a *alertAgent) { a.start("again") },
		},
		{ // a part of the names fails
			name: "failing", alerts: []string{"NametapQueriesFail"},
			begin: func(a *alertAgent) { a.answer(failing, failing) },
			end:   func(a *alertAgent) { a.answer(records, records) },
		},
		{ // one fault with two alerts: the cause and the effect
			name: "refusing", alerts: []string{"NametapNameserverDown", "NametapQueriesFail"},
			begin: func(a *alertAgent) { a.answer(fakedns.Rcode(dns.RcodeServerFailure), fakedns.Rcode(dns.RcodeRefused)) },
			end:   func(a *alertAgent) { a.answer(records, records) },
		},
		{
			name: "silent", alerts: []string{"NametapNameserverDown"},
			begin: func(a *alertAgent) { a.answer(fakedns.Silence, records) },
			end:   func(a *alertAgent) { a.answer(records, records) },
		},
		{ // the nameserver stays silent, and is taken out of resolv.conf
			name: "removed", alerts: []string{"NametapNameserverDown"},
			begin: func(a *alertAgent) { a.answer(fakedns.Silence, records) },
			end:   func(a *alertAgent) { a.writeResolvConf(a.address(54)) },
		},
		{
			name: "tableless", alerts: []string{"NametapNoTable"},
			prepare: func(a *alertAgent) { a.control.Stop() },
			end:     (*alertAgent).restartControl,
		},
		{
			name: "away", alerts: []string{"NametapTableNotUpdated"},
			begin: func(a *alertAgent) { a.control.Stop() }, end: (*alertAgent).restartControl,
		},
		{
			name: "rejecting", alerts: []string{"NametapTableNotUpdated"},
			begin: func(a *alertAgent) { a.control.PushBytes([]byte("no table")) },
			end:   func(a *alertAgent) { a.control.Push(alertTable("10.9.0.2")) },
		},
		{ // a firewall drops what was redirected, in a table that the agent does not change
			name: "dropped", alerts: []string{"NametapNotCaptured"},
			prepare: func(a *alertAgent) { a.args = append(a.args, "--capture") },
			begin: func(a *alertAgent) {
				a.load("type filter hook input priority 10; iif lo ip saddr != 127.0.0.0/8 drop")
			},
			end: (*alertAgent).unload,
		},
		{ // it drops all packets for the agent over IPv4
			name: "cut", alerts: []string{"NametapNotCaptured"},
			prepare: func(a *alertAgent) { a.args = append(a.args, "--capture") },
			begin: func(a *alertAgent) {
				a.load("type filter hook input priority 10; meta l4proto { tcp, udp } th dport 15053 drop")
			},
			end: (*alertAgent).unload,
		},
		{ // rules of another program come first
			name: "bypassed", alerts: []string{"NametapNotCaptured"},
			prepare: func(a *alertAgent) { a.args = append(a.args, "--capture") },
			begin: func(a *alertAgent) {
				a.load("type nat hook output priority -150; meta l4proto { tcp, udp } th dport 53 dnat to " + a.address(54) + ":53")
			},
			end: (*alertAgent).unload,
		},
		{
			name: "expiring", alerts: []string{"NametapCertificateExpires"},
			late:    func(f *fleet) time.Duration { return certificateLife(f) * 2 / 3 },
			prepare: (*alertAgent).startAuthority,
			begin:   func(a *alertAgent) { a.authority.Stop() },
			end: func(a *alertAgent) {
				a.fleet.network.Run(func() {
					if err := a.authority.Restart(); err != nil {
						a.fleet.tb.Error(err)
					}
				})
			},
		},
		{ // another program has an address of the agent
			name: "taken", alerts: []string{"NametapProblem"},
			prepare: (*alertAgent).takeAddress,
			end:     func(a *alertAgent) { _ = a.taken.Close() },
		},
	}
}

// certificateLife returns the life of a certificate that expires just after its alert fires, if it is not renewed.
func certificateLife(f *fleet) time.Duration {
	return 3*f.holds["NametapCertificateExpires"] + time.Minute
}

// failing is a handler by which a fifth of the names of [alertAgent.query] fails.
func failing(query *dns.Msg, network string) *dns.Msg {
	if strings.Contains(query.Question[0].Name, ".fails") {
		return fakedns.Rcode(dns.RcodeServerFailure)(query, network)
	}
	return records(query, network)
}

// alertTable returns a table with one host.
func alertTable(address string) *api.NameTable {
	return &api.NameTable{Table: map[string]*api.NameTable_NameInfo{
		"web.soak.svc.cluster.local": {Ips: []string{address}, Registry: "Kubernetes", Shortname: "web", Namespace: "soak"},
	}}
}

// An alertAgent is an agent, with a host, nameservers and a control plane of its own.
type alertAgent struct {
	fleet   *fleet
	name    string
	number  int
	host    *netns.NS
	service *service
	args    []string
	servers [2]*fakedns.Server
	control *fakexds.Server
	// authority signs certificates, nil without them.
	authority *fakexds.Server
	taken     net.PacketConn
}

// add makes an agent with a fault and starts it.
func (f *fleet) add(fault *fault) {
	f.tb.Helper()
	f.faults = append(f.faults, fault)
	a := &alertAgent{fleet: f, name: fault.name, number: len(f.faults), host: netns.New(f.tb)}
	fault.agent = a
	netns.Connect(
		netns.End{NS: a.host, Name: "eth0", Addrs: []string{a.address(1) + "/24"}},
		netns.End{NS: f.network, Name: fmt.Sprintf("eth%d", a.number), Addrs: []string{a.address(10) + "/24", a.address(53) + "/24", a.address(54) + "/24"}},
	)
	f.network.Run(func() {
		for i, last := range []int{53, 54} {
			a.servers[i] = fakedns.Start(f.tb, records, fakedns.On(netip.AddrPortFrom(netip.MustParseAddr(a.address(last)), 53)), fakedns.Forget)
		}
		a.control = fakexds.Start(f.tb, fakexds.Options{Addr: a.address(10) + ":15010"})
	})
	a.control.Push(alertTable("10.9.0.1"))
	for _, dir := range []string{a.path("state"), a.path("run")} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			f.tb.Fatal(err)
		}
		if err := os.Chown(dir, agentID, agentID); err != nil {
			f.tb.Fatal(err)
		}
	}
	a.writeResolvConf(a.address(53), a.address(54))
	if fault.prepare != nil {
		fault.prepare(a)
	}
	fault.began = time.Now()
	a.start("")
	go a.query(f.tb.Context())
}

// address returns an address of the agent's network.
func (a *alertAgent) address(last int) string { return fmt.Sprintf("10.1.%d.%d", a.number, last) }

// status returns the address of the agent that Prometheus scrapes.
func (a *alertAgent) status() string { return a.address(1) + ":15020" }

// path returns the path of a file of the agent.
func (a *alertAgent) path(name string) string { return filepath.Join(a.fleet.dir, a.name, name) }

// start starts the agent.
func (a *alertAgent) start(log string) {
	a.fleet.tb.Helper()
	a.service = a.fleet.startService(a.name+log, a.host, func() *exec.Cmd {
		args := append([]string{"agent", "--status-addr", a.status(), "--resolv-conf", a.path("resolv.conf"), "--state-dir", a.path("state")}, a.args...)
		if a.authority == nil {
			args = append(args, "--xds-addr", a.control.Addr(), "--xds-plaintext")
		}
		cmd := exec.Command(filepath.Join(a.fleet.bin, "nametap"), args...)
		cmd.Env = append(os.Environ(), "RUNTIME_DIRECTORY="+a.path("run"), "POD_NAME="+a.name, "POD_NAMESPACE=soak", "INSTANCE_IP="+a.address(1))
		cmd.SysProcAttr = &syscall.SysProcAttr{
			Credential: &syscall.Credential{Uid: agentID, Gid: agentID}, AmbientCaps: []uintptr{capNetAdmin}, Pdeathsig: syscall.SIGKILL,
		}
		return cmd
	})
}

// writeResolvConf replaces resolv.conf.
func (a *alertAgent) writeResolvConf(nameservers ...string) {
	text := "nameserver " + strings.Join(nameservers, "\nnameserver ") + "\n"
	path := a.path("resolv.conf")
	err := os.WriteFile(path+".next", []byte(text), 0o644) //nolint:gosec // the agent is another user
	if err == nil {
		err = os.Rename(path+".next", path)
	}
	if err != nil {
		a.fleet.tb.Error(err)
	}
}

// answer replaces what the nameservers answer.
func (a *alertAgent) answer(first, second fakedns.Handler) {
	a.servers[0].Handle(first)
	a.servers[1].Handle(second)
}

// restartControl starts the control plane.
func (a *alertAgent) restartControl() {
	a.fleet.network.Run(func() {
		if err := a.control.Restart(); err != nil {
			a.fleet.tb.Error(err)
		}
	})
}

// startAuthority makes the control plane and a certificate authority, which issues certificates that live for a short
// time.
func (a *alertAgent) startAuthority() {
	a.fleet.tb.Helper()
	authority := fakexds.NewAuthority(a.fleet.tb, istiod, identity)
	authority.SetLife(certificateLife(a.fleet))
	a.control.Stop()
	a.fleet.network.Run(func() {
		a.control = fakexds.Start(a.fleet.tb, fakexds.Options{Addr: a.address(10) + ":15012", Authority: authority, Token: token})
		a.authority = fakexds.Start(a.fleet.tb, fakexds.Options{Addr: a.address(10) + ":15013", Authority: authority, Token: token})
	})
	a.control.Push(alertTable("10.9.0.1"))
	for name, text := range map[string]string{"root.pem": authority.Root(), "token": token} {
		if err := os.WriteFile(a.path(name), []byte(text), 0o644); err != nil { //nolint:gosec // the agent is another user
			a.fleet.tb.Fatal(err)
		}
	}
	a.args = append(a.args, "--xds-addr", a.control.Addr(), "--ca-addr", a.authority.Addr(), "--workload-cert", "on",
		"--xds-root-ca", a.path("root.pem"), "--xds-token-file", a.path("token"), "--xds-server-name", istiod)
}

// takeAddress opens the address of a listener of the agent.
func (a *alertAgent) takeAddress() {
	a.fleet.tb.Helper()
	a.host.Run(func() {
		var err error
		if a.taken, err = new(net.ListenConfig).ListenPacket(a.fleet.tb.Context(), "udp", "[::1]:15053"); err != nil {
			a.fleet.tb.Fatal(err)
		}
	})
	a.fleet.tb.Cleanup(func() { _ = a.taken.Close() })
}

// load makes a chain of another program. Iptables does not show it.
func (a *alertAgent) load(chain string) {
	a.host.Pipe("table ip other {\n chain other {\n "+strings.ReplaceAll(chain, "; ", ";\n ")+"\n }\n}\n", "nft", "-f", "-")
}

// unload removes the chain.
func (a *alertAgent) unload() { a.host.Exec("nft", "delete", "table", "ip", "other") }

// query sends ten queries a second to the agent, or to the nameserver if it captures, until ctx ends.
func (a *alertAgent) query(ctx context.Context) {
	server := "127.0.0.1:15053"
	for _, arg := range a.args {
		if arg == "--capture" {
			server = a.address(53) + ":53"
		}
	}
	var conn net.Conn
	a.host.Run(func() { conn, _ = new(net.Dialer).DialContext(ctx, "udp", server) })
	if conn == nil {
		a.fleet.tb.Errorf("%s: no socket for queries", a.name)
		return
	}
	defer conn.Close()
	go func() {
		for buffer := make([]byte, 2048); ctx.Err() == nil; {
			if _, err := conn.Read(buffer); err != nil { // while no agent runs
				clock.Sleep(ctx, 100*time.Millisecond)
			}
		}
	}()
	for n := 0; clock.Sleep(ctx, 100*time.Millisecond); n++ {
		name := fmt.Sprintf("n%d.works%d.example.", n, n%7) // a nameserver is not blamed for names of one domain
		if n%5 == 0 {
			name = fmt.Sprintf("n%d.fails%d.example.", n, n%7)
		}
		if query, err := new(dns.Msg).SetQuestion(name, dns.TypeA).Pack(); err == nil {
			_, _ = conn.Write(query) // refused while no agent runs
		}
	}
}
