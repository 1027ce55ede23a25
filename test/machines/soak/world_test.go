package soak

import (
	"fmt"
	"hash/fnv"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/lab"
	"github.com/nametap/nametap/test/machines/lab/load"
)

// Addresses and names of the host and of its network.
const (
	hostAddr, hostAddr6 = "10.0.0.1", "fd00::1"
	a4, a6, b4          = "10.0.0.53", "fd00::53", "10.0.0.54"
	controlAddr         = "10.0.0.10:15010"
	controlStatus       = "127.0.0.1:15014"
	searchDomain        = "cluster.local"
	foreign4            = "192.0.2.53" // all names that are not forwarded have it at nameservers
)

// A world is the host, its network, and what runs there.
type world struct {
	t              *testing.T
	host, network  *lab.Place
	nameservers    map[string]*fakedns.Server
	sockets        []*os.File // of the agent
	agent, control *lab.Process
	tables         *tables
}

// newWorld makes a world in which DNS is captured.
func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, host: lab.NewPlace(t), nameservers: map[string]*fakedns.Server{}}
	w.network = w.host.Beside("network")
	netns.Connect(
		netns.End{NS: w.host.NS, Name: "eth0", Addrs: []string{hostAddr + "/24", hostAddr6 + "/64"}},
		netns.End{NS: w.network.NS, Name: "eth0", Addrs: []string{a4 + "/24", a6 + "/64", b4 + "/24", "10.0.0.10/24"}},
	)
	for _, addr := range []string{a4, a6, b4} {
		w.network.Run(func() {
			w.nameservers[addr] = fakedns.Start(t, records, fakedns.On(netip.AddrPortFrom(netip.MustParseAddr(addr), 53)), fakedns.Forget)
		})
	}
	w.host.Runtime = w.host.Mkdir("run", lab.AgentID)
	w.host.Mkdir("state", lab.AgentID)
	w.writeResolvConf(a4, a6, b4)
	w.openSockets()
	w.tables = &tables{dir: w.network.Mkdir("objects", 0)}
	if _, err := w.tables.push(); err != nil {
		t.Fatal(err)
	}
	w.startControl()
	w.startAgent()
	wait.Until(t, "the agent has the table, and captures", func() bool {
		return w.host.Metric(lab.AgentStatus, "nametap_table_hosts") == hosts && w.host.Metric(lab.AgentStatus, "nametap_capture_on") == 1
	})
	return w
}

// records is the handler of the nameservers. The addresses of names below example follow
// from the name. All other names have the address of a nameserver that should not be asked.
func records(query *dns.Msg, _ string) *dns.Msg {
	reply := new(dns.Msg).SetReply(query)
	reply.RecursionAvailable = true
	question := query.Question[0]
	if question.Qtype == dns.TypeA {
		header := dns.RR_Header{Name: question.Name, Rrtype: question.Qtype, Class: dns.ClassINET, Ttl: 2}
		ip := net.ParseIP(foreign4)
		if name := strings.ToLower(question.Name); strings.HasSuffix(name, ".example.") {
			ip = forwardedAddress(name).AsSlice()
		}
		reply.Answer = []dns.RR{&dns.A{Hdr: header, A: ip}}
	}
	return reply
}

// forwardedAddress returns the address of a name below example, in 198.18.0.0/15.
func forwardedAddress(name string) netip.Addr {
	hash := fnv.New32a()
	_, _ = hash.Write([]byte(name)) // never fails
	n := hash.Sum32()
	return netip.AddrFrom4([4]byte{198, 18 + byte(n>>16&1), byte(n >> 8), byte(n)})
}

// forwardedQuestions returns names in no cache, and some that may be cached.
func forwardedQuestions() []load.Question {
	check := func(a load.Answer) error {
		if want := forwardedAddress(a.Name); a.Rcode != dns.RcodeSuccess || len(a.Addresses) != 1 || a.Addresses[0] != want {
			return fmt.Errorf("want %v", want)
		}
		return nil
	}
	questions := []load.Question{{Name: "*.unique.example", Weight: 100, Check: check}}
	for n := range 100 {
		questions = append(questions, load.Question{Name: fmt.Sprintf("n%d.cached.example", n), Check: check})
	}
	return questions
}

// startLoad starts a load that asks a nameserver.
func (w *world) startLoad(server string, rate int, questions []load.Question) *load.Load {
	w.t.Helper()
	l, err := load.Start(load.Config{
		Server: netip.AddrPortFrom(netip.MustParseAddr(server), 53), Rate: rate, TCP: 0.05, Kept: 0.2, Timeout: timeout, Seed: *seed, Enter: w.host.Run,
		Expect: &load.Expectation{Questions: questions, Foreign: []netip.Prefix{netip.MustParsePrefix(foreign4 + "/32")}},
	})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { l.Stop() })
	return l
}

// writeResolvConf replaces resolv.conf.
func (w *world) writeResolvConf(servers ...string) {
	w.host.Write("resolv.conf", "search "+searchDomain+"\nnameserver "+strings.Join(servers, "\nnameserver ")+"\n")
}

// openSockets opens the agent's sockets with the options of nametap.socket.
func (w *world) openSockets() {
	w.t.Helper()
	config := net.ListenConfig{Control: func(_, _ string, conn syscall.RawConn) (err error) {
		controlErr := conn.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 4<<20)
		})
		if controlErr != nil {
			return controlErr
		}
		return err
	}}
	w.host.Run(func() {
		for _, address := range []string{"127.0.0.1:15053", "[::1]:15053"} {
			udp, err := config.ListenPacket(w.t.Context(), "udp", address)
			if err != nil {
				w.t.Fatal(err)
			}
			defer udp.Close()
			tcp, err := config.Listen(w.t.Context(), "tcp", address)
			if err != nil {
				w.t.Fatal(err)
			}
			defer tcp.Close()
			for _, socket := range []any{udp, tcp} {
				file, err := socket.(interface{ File() (*os.File, error) }).File()
				if err != nil {
					w.t.Fatal(err)
				}
				w.t.Cleanup(func() { file.Close() })
				w.sockets = append(w.sockets, file)
			}
		}
	})
}

// startAgent starts an agent, as nametap.service does.
func (w *world) startAgent() {
	w.t.Helper()
	agent := w.host.AgentCommand("host", "soak", "--capture", "--instance-ip", hostAddr, "--xds-addr", controlAddr, "--xds-plaintext",
		"--resolv-conf", w.host.Path("resolv.conf"), "--state-dir", w.host.Path("state"))
	cmd := exec.Command("/bin/sh", append([]string{"-c", `LISTEN_PID=$$ exec "$0" "$@"`}, agent.Args...)...)
	cmd.Env = append(agent.Env, fmt.Sprintf("LISTEN_FDS=%d", len(w.sockets)))
	cmd.ExtraFiles = w.sockets
	w.agent = w.host.Spawn("agent", lab.Unprivileged(cmd))
}

// startControl starts the control plane.
func (w *world) startControl() {
	w.t.Helper()
	w.control = w.network.Discovery("control", controlStatus, nil, "--config-dir", w.tables.dir, "--grpc-addr", controlAddr)
}
