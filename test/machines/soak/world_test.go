package soak

import (
	"context"
	"fmt"
	"hash/fnv"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/process"
	"github.com/nametap/nametap/test/machines/load"
)

// Addresses and names of the host and of its network.
const (
	hostAddr, hostAddr6 = "10.0.0.1", "fd00::1"
	a4, a6, b4          = "10.0.0.53", "fd00::53", "10.0.0.54"
	controlAddr         = "10.0.0.10:15010"
	controlStatus       = "127.0.0.1:15014"
	statusAddr          = "127.0.0.1:15020"
	searchDomain        = "corp.test"
	reconcile           = 5 * time.Second // of the agent
	agentID             = 1337
	capNetAdmin         = 12
	foreign4, foreign6  = "192.0.2.53", "2001:db8::53" // mesh names have them at nameservers
)

// A world is the host, its network, and what runs there.
type world struct {
	tb            *testing.T
	dir           string // with logs, the objects of the control plane, and the state of the agent
	bin           string // with the binaries
	host, network *netns.NS
	a, b          []*fakedns.Server
	resolvConf    string
	sockets       []*os.File // of the agent
	agent         *service
	control       *service
	tables        *tables
	timeline      timeline
}

// newWorld makes the namespaces and starts the nameservers.
func newWorld(t *testing.T) *world {
	t.Helper()
	need(t, "ip", "iptables-nft", "ip6tables-nft", "nft")
	w := &world{tb: t, dir: logDir(t)}
	var err error
	if w.bin, err = process.Build("nametap", "nametap-discovery"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(w.bin) })
	w.host, w.network = netns.New(t), netns.New(t)
	netns.Connect(
		netns.End{NS: w.host, Name: "eth0", Addrs: []string{hostAddr + "/24", hostAddr6 + "/64"}},
		netns.End{NS: w.network, Name: "eth0", Addrs: []string{a4 + "/24", a6 + "/64", b4 + "/24", "10.0.0.10/24"}},
	)
	for _, addr := range []string{a4, a6, b4} {
		w.network.Run(func() {
			server := fakedns.Start(t, records, fakedns.On(netip.AddrPortFrom(netip.MustParseAddr(addr), 53)))
			if addr == b4 {
				w.b = append(w.b, server)
			} else {
				w.a = append(w.a, server)
			}
		})
	}
	objects := filepath.Join(w.dir, "objects")
	for _, dir := range []string{objects, filepath.Join(w.dir, "state"), filepath.Join(w.dir, "control-state"), filepath.Join(w.dir, "run")} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, dir := range []string{"state", "run"} {
		if err := os.Chown(filepath.Join(w.dir, dir), agentID, agentID); err != nil {
			t.Fatal(err)
		}
	}
	backOff, err := os.ReadFile("../../../deploy/systemd/back-off")
	if err == nil {
		err = os.WriteFile(filepath.Join(w.dir, "back-off"), backOff, 0o755) //nolint:gosec // a program
	}
	if err != nil {
		t.Fatal(err)
	}
	w.takeNotifications()
	w.resolvConf = filepath.Join(w.dir, "resolv.conf")
	w.tables = &tables{dir: objects}
	return w
}

// need fails the test unless it has root and all commands.
func need(t *testing.T, commands ...string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("this test makes network namespaces: run it as root")
	}
	for _, command := range commands {
		if _, err := exec.LookPath(command); err != nil {
			t.Fatalf("a command is missing: install the packages iproute2, iptables and nftables: %v", err)
		}
	}
}

// logDir returns a directory that is kept if the test fails.
func logDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "nt-soak-") //nolint:usetesting // it is kept if the test fails
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil { // the agent is another user
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("logs are in %s", dir)
			return
		}
		_ = os.RemoveAll(dir)
	})
	return dir
}

// records is the handler of the nameservers. The addresses of names below example follow
// from the name. All other names have the address of a nameserver that should not be asked.
func records(query *dns.Msg, _ string) *dns.Msg {
	reply := new(dns.Msg).SetReply(query)
	reply.RecursionAvailable = true
	question := query.Question[0]
	header := dns.RR_Header{Name: question.Name, Rrtype: question.Qtype, Class: dns.ClassINET, Ttl: 2}
	name := strings.ToLower(question.Name)
	switch forwarded := strings.HasSuffix(name, ".example."); {
	case question.Qtype == dns.TypeA && forwarded:
		reply.Answer = []dns.RR{&dns.A{Hdr: header, A: forwardedAddress(name).AsSlice()}}
	case question.Qtype == dns.TypeA:
		reply.Answer = []dns.RR{&dns.A{Hdr: header, A: net.ParseIP(foreign4)}}
	case question.Qtype == dns.TypeAAAA && !forwarded:
		reply.Answer = []dns.RR{&dns.AAAA{Hdr: header, AAAA: net.ParseIP(foreign6)}}
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

// checkForwarded returns an error unless an answer is that of the nameservers.
func checkForwarded(a load.Answer) error {
	if want := forwardedAddress(a.Name); a.Rcode != dns.RcodeSuccess || len(a.Addresses) != 1 || a.Addresses[0] != want {
		return fmt.Errorf("want %v", want)
	}
	return nil
}

// expectation returns what the loads ask.
func (w *world) expectation() *load.Expectation {
	questions := append(w.tables.questions(), load.Question{Name: "*.unique.example", Weight: hosts / 8, Check: checkForwarded})
	for n := range 200 {
		questions = append(questions, load.Question{Name: fmt.Sprintf("n%d.cached.example", n), Weight: 4, Check: checkForwarded})
	}
	return &load.Expectation{Questions: questions, Foreign: []netip.Prefix{
		netip.MustParsePrefix(foreign4 + "/32"), netip.MustParsePrefix(foreign6 + "/128"),
	}}
}

// exec runs a command on the host. Unlike NS.Exec it may be called from any goroutine.
func (w *world) exec(ctx context.Context, input, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdin = strings.NewReader(input)
	var output strings.Builder
	cmd.Stdout, cmd.Stderr = &output, &output
	var err error
	w.host.Run(func() { err = cmd.Start() })
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil && ctx.Err() == nil {
		return fmt.Errorf("%v: %w\n%s", cmd, err, &output)
	}
	return nil
}

// openSockets opens the agent's sockets with the options of nametap.socket.
func (w *world) openSockets() {
	w.tb.Helper()
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
			udp, err := config.ListenPacket(w.tb.Context(), "udp", address)
			if err != nil {
				w.tb.Fatal(err)
			}
			defer udp.Close()
			tcp, err := config.Listen(w.tb.Context(), "tcp", address)
			if err != nil {
				w.tb.Fatal(err)
			}
			defer tcp.Close()
			for _, socket := range []any{udp, tcp} {
				file, err := socket.(interface{ File() (*os.File, error) }).File()
				if err != nil {
					w.tb.Fatal(err)
				}
				w.tb.Cleanup(func() { file.Close() })
				w.sockets = append(w.sockets, file)
			}
		}
	})
}

// agentCommand returns the command of an agent, as in nametap.service.
func (w *world) agentCommand() *exec.Cmd {
	cmd := exec.Command("/bin/sh", "-c", `LISTEN_PID=$$ exec "$0" "$@"`, filepath.Join(w.dir, "back-off"), filepath.Join(w.bin, "nametap"), "agent", "--capture",
		"--xds-addr", controlAddr, "--xds-plaintext", "--status-addr", statusAddr,
		"--resolv-conf", w.resolvConf, "--state-dir", filepath.Join(w.dir, "state"))
	cmd.Env = append(os.Environ(), "NOTIFY_SOCKET="+filepath.Join(w.dir, "notify"), "RUNTIME_DIRECTORY="+filepath.Join(w.dir, "run"),
		"POD_NAME=host", "POD_NAMESPACE=soak", "INSTANCE_IP="+hostAddr, fmt.Sprintf("LISTEN_FDS=%d", len(w.sockets)))
	cmd.ExtraFiles = w.sockets
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Credential: &syscall.Credential{Uid: agentID, Gid: agentID}, AmbientCaps: []uintptr{capNetAdmin},
		Pdeathsig: syscall.SIGKILL,
	}
	return cmd
}

// takeNotifications reads what agents tell systemd.
func (w *world) takeNotifications() {
	w.tb.Helper()
	path := filepath.Join(w.dir, "notify")
	notified, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Net: "unixgram", Name: path})
	if err == nil {
		err = os.Chmod(path, 0o777)
	}
	if err != nil {
		w.tb.Fatal(err)
	}
	w.tb.Cleanup(func() { notified.Close() })
	go func() {
		for err := error(nil); err == nil; { // until the test has ended
			_, err = notified.Read(make([]byte, 512))
		}
	}()
}

// controlCommand returns the command of the control plane.
func (w *world) controlCommand() *exec.Cmd {
	cmd := exec.Command(filepath.Join(w.bin, "nametap-discovery"), "--config-dir", w.tables.dir, "--grpc-addr", controlAddr,
		"--http-addr", controlStatus, "--state-dir", filepath.Join(w.dir, "control-state"))
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd
}
