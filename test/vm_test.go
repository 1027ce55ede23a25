package test

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"net"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// A VM also has the two nameservers over IPv6, all behind eth0.
const (
	named6 = "fd00::53"
	other6 = "fd00::54"

	self  = "10.0.0.1"
	self6 = "fd00::1"

	mesh    = "web.shop.svc.cluster.local"
	meshIP  = "10.1.0.1"   // from the agent
	namedIP = "192.0.2.53" // from the nameserver in resolv.conf, for every name
	otherIP = "192.0.2.54"
)

// The capabilities that iptables-legacy needs besides CAP_NET_ADMIN if the user is not
// root: it opens a raw socket, and only root can read the names of its tables.
const (
	capDACReadSearch = 2
	capNetRaw        = 13
)

// A vm is a host with its nameservers on another machine, over both families.
type vm struct {
	*host
	backend        string    // of its rules
	net            *netns.NS // the other machine
	named6, other6 *fakedns.Server
}

// newVM makes a vm. Its agents listen for both families, use the backend, forward with a
// timeout of 1 s, so they settle in 2 s, and check rules every second.
func newVM(tb testing.TB, backend string) *vm {
	tb.Helper()
	netns.Need(tb, "ip", "iptables-nft", "iptables-legacy", "dig")
	v := &vm{host: newBareHost(tb), backend: backend, net: netns.New(tb)}
	netns.Connect(
		netns.End{NS: v.NS, Name: "eth0", Addrs: []string{self + "/24", self6 + "/64"}},
		netns.End{NS: v.net, Name: "eth0", Addrs: []string{named + "/24", other + "/24", named6 + "/64", other6 + "/64"}},
	)
	v.named, v.other = nameserver(tb, v.net, named, namedIP), nameserver(tb, v.net, other, otherIP)
	v.named6, v.other6 = nameserver(tb, v.net, named6, namedIP), nameserver(tb, v.net, other6, otherIP)
	for _, tool := range []string{"iptables", "ip6tables"} {
		if backend != "auto" {
			tool += "-" + backend
		}
		for _, table := range []string{"nat", "raw"} { // rules of another program; legacy also keeps every table that was ever used
			v.Exec(tool, "-w", "-t", table, "-A", "OUTPUT", "-p", "udp", "-m", "udp", "--dport", "5353", "-j", "RETURN")
		}
	}
	v.signal = syscall.SIGKILL // faster than the removal of rules after each test
	v.flags = []string{"--dns-addr", "localhost:15053", "--capture-backend", backend, "--upstream-timeout", "1s", "--capture-reconcile", "1s"}
	if backend == "legacy" {
		v.capabilities = append(v.capabilities, capNetRaw, capDACReadSearch)
	}
	return v
}

// vms runs a subtest for each backend of iptables, at the same time.
func vms(t *testing.T, test func(v *vm)) {
	t.Helper()
	for _, backend := range []string{"nft", "legacy"} {
		t.Run(backend, func(t *testing.T) {
			t.Parallel()
			test(newVM(t, backend))
		})
	}
}

// captured reports whether the kernel has rules of nametap, in any backend and family.
func (v *vm) captured() bool {
	v.tb.Helper()
	return strings.Contains(v.Rules(), "-j NAMETAP_OUTPUT")
}

// capture starts an agent with --capture, and returns when the rules are installed.
func (v *vm) capture(flags ...string) *agent {
	v.tb.Helper()
	a := v.start(append([]string{"--capture"}, flags...)...)
	wait.Until(v.tb, "DNS is captured", func() bool {
		select {
		case <-a.ended:
			v.tb.Fatal("the agent ended")
		default:
		}
		return v.metric("nametap_capture_on") == 1
	})
	return a
}

// A result is the output and the exit code of a command.
type result struct {
	stdout, stderr string
	code           int
}

// run runs a command and returns its result. A command that fails does not fail the test.
func (h *host) run(cmd *exec.Cmd) result {
	h.tb.Helper()
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := h.Start(cmd)
	if err == nil {
		err = cmd.Wait()
	}
	if exit := new(exec.ExitError); err != nil && !errors.As(err, &exit) {
		h.tb.Fatalf("%s: %v", cmd, err)
	}
	return result{stdout.String(), stderr.String(), cmd.ProcessState.ExitCode()}
}

// args returns the arguments of a subcommand of capture, with the VM's flags.
func (v *vm) args(subcommand string, flags ...string) []string {
	return slices.Concat([]string{"capture", subcommand}, v.flags, flags)
}

// nametap runs a subcommand as the agent's user.
func (h *host) nametap(args ...string) result {
	h.tb.Helper()
	return h.run(h.command(args...))
}

// root runs a subcommand as root, as an init container does.
func (h *host) root(args ...string) result {
	h.tb.Helper()
	cmd := h.command(args...)
	cmd.SysProcAttr = nil
	return h.run(cmd)
}

// client runs a program with text as its /etc/resolv.conf, in a mount namespace of its own.
func (h *host) client(text string, args ...string) string {
	h.tb.Helper()
	path := h.write("resolv.conf-"+strconv.Itoa(len(text)), text)
	script := `mount --bind "$0" /etc/resolv.conf && exec "$@"`
	return h.Exec("unshare", append([]string{"--mount", "sh", "-c", script, path}, args...)...)
}

// metric returns the value of one of the agent's metrics.
func (h *host) metric(name string) float64 {
	h.tb.Helper()
	for line := range strings.Lines(h.get("/metrics")) {
		if text, found := strings.CutPrefix(line, name+" "); found {
			value, err := strconv.ParseFloat(strings.TrimSpace(text), 64)
			if err != nil {
				h.tb.Fatal(err)
			}
			return value
		}
	}
	h.tb.Fatalf("there is no metric %s", name)
	return 0
}

// meshConfig returns a mesh config that switches capture on or off.
func meshConfig(on bool) string {
	return fmt.Sprintf("defaultConfig:\n  proxyMetadata:\n    ISTIO_META_DNS_CAPTURE: %q\n", strconv.FormatBool(on))
}

// replace is like write, but replaces the file by a rename, so no program reads half of it.
func (h *host) replace(name, text string) string {
	h.tb.Helper()
	path := filepath.Join(h.dir, name)
	h.Exec("mv", h.write(name+".new", text), path)
	return path
}

// A load is a set of applications on a VM that send 1,000 queries per second, half of them
// over each family. It counts the answers.
type load struct {
	began time.Time
	stop  chan struct{}
	done  sync.WaitGroup

	mu      sync.Mutex
	answers map[string]int // by their address, or by the error
	slowest time.Duration
}

// loadRate is queries per second.
const loadRate = 1000

// load starts a load. Each family has three applications that keep their socket, one that
// opens a new socket for every query, and one that uses TCP.
func (v *vm) load() *load {
	l := &load{began: time.Now(), stop: make(chan struct{}), answers: map[string]int{}}
	const each = 5
	for _, server := range []string{named, named6} {
		for n := range each {
			l.done.Go(func() {
				v.Run(func() { l.ask(net.JoinHostPort(server, "53"), n, 2*each*time.Second/loadRate) })
			})
		}
	}
	v.tb.Cleanup(func() { l.end() })
	return l
}

// ask runs one application, the nth of its family.
func (l *load) ask(server string, n int, interval time.Duration) {
	network := "udp"
	if n == 4 {
		network = "tcp"
	}
	var conn *dns.Conn
	defer func() {
		if conn != nil {
			_ = conn.Close() // no more queries follow
		}
	}()
	for i := 0; ; i++ {
		select {
		case <-l.stop:
			return
		case <-time.After(time.Until(l.began.Add(time.Duration(i) * interval))): // late queries are sent without a pause
		}
		name := mesh
		if i%2 == 1 {
			name = fmt.Sprintf("%d.%d.example.org", n, i) // in no cache
		}
		if conn != nil && n >= 3 {
			_ = conn.Close() // nothing is awaited
			conn = nil
		}
		began := time.Now()
		address, err := "", error(nil)
		if conn == nil {
			conn, err = dns.DialTimeout(network, server, 5*time.Second)
		}
		if err == nil {
			address, err = askOn(conn, name)
		}
		if i%2 == 1 && err == nil {
			address += " forwarded"
		}
		l.note(address, time.Since(began), err)
	}
}

// askOn sends a query on a connection and returns the address in the answer.
func askOn(conn *dns.Conn, name string) (string, error) {
	client := dns.Client{Timeout: 5 * time.Second}
	reply, _, err := client.ExchangeWithConn(new(dns.Msg).SetQuestion(dns.Fqdn(name), dns.TypeA), conn)
	if err != nil {
		return "", err
	}
	if len(reply.Answer) == 1 {
		if a, ok := reply.Answer[0].(*dns.A); ok {
			return a.A.String(), nil
		}
	}
	return "", fmt.Errorf("%s", dns.RcodeToString[reply.Rcode])
}

// note counts the answer or the error of a query.
func (l *load) note(address string, took time.Duration, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.slowest = max(l.slowest, took)
	if err != nil {
		address = fmt.Sprintf("lost after %v: %v", time.Since(l.began).Round(time.Millisecond), err)
	}
	l.answers[address]++
}

// of returns the number of answers with an address.
func (l *load) of(address string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.answers[address]
}

// more waits for more answers with an address.
func (v *vm) more(l *load, address string) {
	v.tb.Helper()
	want := l.of(address) + 100
	wait.Until(v.tb, "queries are answered with "+address, func() bool { return l.of(address) >= want })
}

// end ends the load. It may be called more than once.
func (l *load) end() map[string]int {
	l.mu.Lock()
	select {
	case <-l.stop:
	default:
		close(l.stop)
	}
	l.mu.Unlock()
	l.done.Wait()
	return l.answers
}

// noneLost ends the load and fails the test if a query was lost or wrongly answered.
func (v *vm) noneLost(l *load) {
	v.tb.Helper()
	took := time.Since(l.began)
	answers := l.end()
	total := 0
	for _, n := range answers {
		total += n
	}
	v.tb.Logf("%d queries, %.0f a second, the slowest in %v: %v", total, float64(total)/took.Seconds(), l.slowest, answers)
	for _, address := range slices.Collect(maps.Keys(answers)) {
		if address != meshIP && address != namedIP && address != namedIP+" forwarded" {
			v.tb.Errorf("%d queries: %s", answers[address], address)
		}
	}
}
