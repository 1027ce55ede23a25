package test

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/fakexds"
	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
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
	authority    []byte     // of its nameserver over TLS, PEM
	environment  []string   // of its agents, besides the test's own
	flags        []string   // of its agents, before those of a test
	signal       os.Signal  // that ends its agents after the test
	output       *os.File   // of its agents; nil is the log
	sockets      []*os.File // of its agents, passed as by systemd
	terminal     bool       // its agents have a terminal that controls them
	chroot       string     // root directory of its agents, with nametap at the place that it has in the image; empty is that of the test
	descriptors  int        // limit of its agents; 0 means that of the test
}

// capNetAdmin is CAP_NET_ADMIN.
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
	h := &host{NS: netns.New(tb), tb: tb, dir: tb.TempDir(), capabilities: []uintptr{capNetAdmin}, signal: terminate}
	// The agent runs as another user.
	for dir := h.dir; dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil {
			tb.Fatal(err)
		}
	}
	h.Run(func() { h.xds = fakexds.Start(tb, fakexds.Options{}) })
	h.xds.Push(&api.NameTable{Table: map[string]*api.NameTable_NameInfo{
		"web.shop.svc.cluster.local": {Ips: []string{"10.1.0.1"}, Registry: "Kubernetes", Shortname: "web", Namespace: "shop"},
	}})
	h.resolvConf = h.write("resolv.conf", "nameserver "+named+"\n")
	return h
}

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

// An agent is the process of an agent.
type agent struct {
	*exec.Cmd
	host  *host
	log   *testlog.Buffer
	ended chan struct{}
}

// start starts an agent with the host's control plane and resolv.conf, and more flags, and
// returns when it is ready. Like the unit, it runs as user and group agentID with only
// CAP_NET_ADMIN, unless the fields of the host say otherwise.
func (h *host) start(flags ...string) *agent {
	h.tb.Helper()
	a := h.launch(flags...)
	wait.Until(h.tb, "the agent is ready", func() bool {
		select {
		case <-a.ended:
			h.tb.Fatal("the agent ended")
		default:
		}
		return strings.HasPrefix(h.get("/healthz/ready"), "HTTP/1.0 200")
	})
	return a
}

// command returns a call of nametap by the agent's user, with the environment and the
// capabilities of the unit.
func (h *host) command(args ...string) *exec.Cmd {
	cmd := exec.Command(binary, args...)
	if h.descriptors > 0 {
		cmd = exec.Command("prlimit", append([]string{fmt.Sprintf("--nofile=%d", h.descriptors), binary}, args...)...)
	}
	if h.chroot != "" {
		cmd.Path = imageBinary
	}
	cmd.Env = append(slices.Concat(os.Environ(), h.environment), "POD_NAME=web-0", "POD_NAMESPACE=shop", "INSTANCE_IP=10.1.2.3")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Chroot:      h.chroot,
		Credential:  &syscall.Credential{Uid: agentID, Gid: agentID},
		AmbientCaps: h.capabilities,
		Pdeathsig:   syscall.SIGKILL,
		Setsid:      true, // without the terminal of the test, if there is one
	}
	if h.sameUser {
		cmd.SysProcAttr.Credential, cmd.SysProcAttr.AmbientCaps = nil, nil
	}
	return cmd
}

// launch starts an agent without waiting.
func (h *host) launch(flags ...string) *agent {
	h.tb.Helper()
	args := slices.Concat([]string{
		"agent", "--xds-addr", h.xds.Addr(), "--xds-plaintext", "--dns-addr", dnsAddr, "--status-addr", statusAddr,
		"--resolv-conf", h.resolvConf, "--drain", "10ms", "--state-dir", "",
	}, h.flags, flags)
	return h.launchCommand(h.command(args...))
}

// launchCommand starts a command that is an agent, and ends it after the test.
func (h *host) launchCommand(cmd *exec.Cmd) *agent {
	h.tb.Helper()
	a := &agent{Cmd: cmd, host: h, log: testlog.New(h.tb), ended: make(chan struct{})}
	a.Stdout, a.Stderr = a.log, a.log
	if h.output != nil {
		a.Stdout, a.Stderr = h.output, h.output
	}
	if len(h.sockets) > 0 {
		a.ExtraFiles = h.sockets
		a.Env = append(a.Env, fmt.Sprintf("LISTEN_FDS=%d", len(h.sockets)))
		a.Path, a.Args = "/bin/sh", append([]string{"sh", "-c", `LISTEN_PID=$$ exec "$0" "$@"`}, a.Args...)
	}
	if h.terminal {
		a.ExtraFiles = append(a.ExtraFiles, openTerminal(h.tb))
		a.SysProcAttr.Setctty, a.SysProcAttr.Ctty = true, 2+len(a.ExtraFiles)
	}
	if err := h.Start(a.Cmd); err != nil {
		h.tb.Fatal(err)
	}
	go func() {
		_ = a.Wait() // how it ended is in the log
		close(a.ended)
	}()
	h.tb.Cleanup(func() { a.end(h.signal) })
	return a
}

// get returns the response of the agent's status endpoint with its header, or an empty
// string if no process listens.
func (h *host) get(path string) string {
	h.tb.Helper()
	var response []byte
	h.Run(func() {
		conn, err := net.DialTimeout("tcp", statusAddr, wait.Limit)
		if err != nil {
			return
		}
		defer conn.Close()
		if _, err = fmt.Fprintf(conn, "GET %s HTTP/1.0\r\n\r\n", path); err == nil {
			response, err = io.ReadAll(conn)
		}
		if err != nil {
			h.tb.Fatal(err)
		}
	})
	return string(response)
}

// end sends a signal and returns when the process has ended.
func (a *agent) end(signal os.Signal) {
	a.host.tb.Helper()
	_ = a.Process.Signal(signal) // it may have ended
	select {
	case <-a.ended:
	case <-time.After(wait.Limit):
		_ = a.Process.Kill()
		<-a.ended
		a.host.tb.Errorf("the agent did not end on %v", signal)
	}
}

// dig runs dig and returns the addresses, or the response code if there are none.
func (h *host) dig(args ...string) string {
	h.tb.Helper()
	output := h.Exec("dig", append([]string{"+tries=1", "+timeout=5"}, args...)...)
	var found []string
	for line := range strings.Lines(output) {
		fields := strings.Fields(line)
		if len(fields) == 5 && fields[3] == "A" {
			found = append(found, fields[4])
		}
	}
	if len(found) > 0 {
		return strings.Join(found, " ")
	}
	_, after, _ := strings.Cut(output, "status: ")
	rcode, _, _ := strings.Cut(after, ",")
	return rcode
}
