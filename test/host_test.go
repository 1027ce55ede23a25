package test

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/fakexds"
	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/process"
)

// Addresses on every host.
const (
	named      = "10.0.0.53" // the nameserver in resolv.conf
	other      = "10.0.0.54" // a nameserver that resolv.conf does not name
	dnsAddr    = "127.0.0.1:15053"
	statusAddr = "127.0.0.1:15054"

	agentID = 1337 // user and group of the agent

	terminate = syscall.SIGTERM
)

// A host is a network namespace with two nameservers on its loopback interface, a control
// plane and, once a test starts it, an agent.
type host struct {
	*netns.NS
	tb           testing.TB
	dir          string
	resolvConf   string
	xds          *fakexds.Server
	named, other *fakedns.Server
	capabilities []uintptr  // of its agents
	sameUser     bool       // its agents run as the user of the test, with its capabilities
	environment  []string   // of its agents, besides the test's own
	flags        []string   // of its agents, before those of a test
	signal       os.Signal  // that ends its agents after the test
	sockets      []*os.File // of its agents, passed as by systemd
	wrapper      string     // a program that runs its agents with sockets; empty is none
	terminal     bool       // its agents have a terminal that controls them
	descriptors  int        // limit of its agents; 0 means that of the test
}

// capNetAdmin is the capability that the agent has for its rules.
const capNetAdmin = 12

// newHost makes a host. Its nameservers answer every name with one address: the one in
// resolv.conf with 192.0.2.53, the other one with 192.0.2.54.
func newHost(tb testing.TB) *host {
	tb.Helper()
	h := newBareHost(tb)
	for _, addr := range []string{named, other} {
		h.Exec("ip", "address", "add", addr+"/32", "dev", "lo")
	}
	h.named, h.other = nameserver(tb, h.NS, named, "192.0.2.53"), nameserver(tb, h.NS, other, "192.0.2.54")
	return h
}

// newBareHost makes a host without nameservers.
func newBareHost(tb testing.TB) *host {
	tb.Helper()
	h := &host{NS: netns.New(tb), tb: tb, capabilities: []uintptr{capNetAdmin}, signal: terminate}
	var err error
	//nolint:usetesting // tb.TempDir has the name of the test, and sockets take short paths only
	if h.dir, err = os.MkdirTemp("", "host-"); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { os.RemoveAll(h.dir) })
	// The agent runs as another user.
	for dir := h.dir; dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil {
			tb.Fatal(err)
		}
	}
	run := h.runDir()
	if err := errors.Join(os.Mkdir(run, 0o755), os.Chmod(run, 0o777)); err != nil {
		tb.Fatal(err)
	}
	h.Run(func() { h.xds = fakexds.Start(tb, fakexds.Options{}) })
	h.xds.Push(&api.NameTable{Table: map[string]*api.NameTable_NameInfo{
		"web.shop.svc.cluster.local": {Ips: []string{"10.1.0.1"}, Registry: "Kubernetes", Shortname: "web", Namespace: "shop"},
	}})
	h.resolvConf = h.write("resolv.conf", "nameserver "+named+"\n")
	return h
}

// runDir returns the runtime directory of the host's agents, in which their private socket is.
func (h *host) runDir() string { return filepath.Join(h.dir, "runtime") }

// nameserver starts a nameserver on port 53 of an address of a namespace. It answers all
// names with one address.
func nameserver(tb testing.TB, ns *netns.NS, addr, has string) *fakedns.Server {
	tb.Helper()
	var server *fakedns.Server
	ns.Run(func() {
		server = fakedns.Start(tb, anyName(has), fakedns.On(netip.AddrPortFrom(netip.MustParseAddr(addr), 53)))
	})
	return server
}

// anyName returns a handler that answers every name with one address.
func anyName(address string) fakedns.Handler {
	ip := net.ParseIP(address)
	return func(query *dns.Msg, _ string) *dns.Msg {
		reply := new(dns.Msg).SetReply(query)
		if query.Opcode == dns.OpcodeQuery && query.Question[0].Qtype == dns.TypeA {
			header := dns.RR_Header{Name: query.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 60}
			reply.RecursionAvailable, reply.Answer = true, []dns.RR{&dns.A{Hdr: header, A: ip}}
		}
		return reply
	}
}

// write writes a file of the host and returns its path.
func (h *host) write(name, text string) string {
	h.tb.Helper()
	path := filepath.Join(h.dir, name)
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		h.tb.Fatal(err)
	}
	return path
}

// script writes a program in the host's directory and returns its path.
func (h *host) script(name, text string) string {
	h.tb.Helper()
	path := filepath.Join(h.dir, name)
	process.WriteScript(h.tb, path, text)
	return path
}

// agentDir makes a directory of the agent's user and returns its path.
func (h *host) agentDir(name string) string {
	h.tb.Helper()
	path := filepath.Join(h.dir, name)
	if err := os.Mkdir(path, 0o700); err != nil {
		h.tb.Fatal(err)
	}
	if err := os.Chown(path, agentID, agentID); err != nil {
		h.tb.Fatal(err)
	}
	return path
}

// replace is like write, but replaces the file by a rename, so no program reads half of it.
func (h *host) replace(name, text string) string {
	h.tb.Helper()
	path := filepath.Join(h.dir, name)
	h.Exec("mv", h.write(name+".new", text), path)
	return path
}
