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

// What a VM has besides: the same two nameservers over IPv6, and both behind eth0.
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

// What legacy takes besides CAP_NET_ADMIN of a user that is not root: its socket is a raw
// one, and what names its tables is for root to read.
const (
	capDACReadSearch = 2
	capNetRaw        = 13
)

// A vm is a host whose nameservers are on another machine. They have both families.
type vm struct {
	*host
	backend        string    // of its rules
	net            *netns.NS // the other machine
	named6, other6 *fakedns.Server
}

// newVM makes one whose agents listen for both families, have their rules in a backend,
// take 1 s for what they forward, and so settle in 2 s, and look after rules every
// second.
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
		for _, table := range []string{"nat", "raw"} { // of others, and legacy keeps a table that was ever used
			v.Exec(tool, "-w", "-t", table, "-A", "OUTPUT", "-p", "udp", "-m", "udp", "--dport", "5353", "-j", "RETURN")
		}
	}
	v.signal = syscall.SIGKILL // or each test would take as long as rules take to go
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

// captured reports whether rules of ours are in, of any backend and family.
func (v *vm) captured() bool {
	v.tb.Helper()
	return strings.Contains(v.saves(), "-j NAMETAP_OUTPUT")
}

// capture starts an agent that captures, and returns when it does.
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

// saves is what all four iptables-save print, without comments and counters.
func (v *vm) saves() string {
	v.tb.Helper()
	var all strings.Builder
	for _, tool := range []string{"iptables-nft", "ip6tables-nft", "iptables-legacy", "ip6tables-legacy"} {
		all.WriteString(withoutCounters(v.Exec(tool + "-save")))
	}
	return all.String()
}

// withoutCounters leaves out what changes by itself: times, and counts of packets.
func withoutCounters(save string) string {
	var kept []string
	for line := range strings.Lines(save) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		if before, _, found := strings.Cut(line, "["); found && strings.HasPrefix(line, ":") {
			line = before + "\n"
		}
		kept = append(kept, line)
	}
	return strings.Join(kept, "")
}

// A result is what a command said and how it ended.
type result struct {
	stdout, stderr string
	code           int
}

// run runs a command to its end, however that is.
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

// client runs a program that sees text for its /etc/resolv.conf, in a mount namespace
// that ends with it.
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

// meshConfig is Istio's, which turns capture on or off.
func meshConfig(on bool) string {
	return fmt.Sprintf("defaultConfig:\n  proxyMetadata:\n    ISTIO_META_DNS_CAPTURE: %q\n", strconv.FormatBool(on))
}

// replace is write by renaming, as programs do who want nobody to read half of it.
func (h *host) replace(name, text string) string {
	h.tb.Helper()
	path := filepath.Join(h.dir, name)
	h.Exec("mv", h.write(name+".new", text), path)
	return path
}

// A load is applications on a VM that ask 1,000 queries a second in all, half of them
// over each family, and what became of those.
type load struct {
	began time.Time
	stop  chan struct{}
	done  sync.WaitGroup

	mu      sync.Mutex
	answers map[string]int // by their address, or by what became of them
	slowest time.Duration
}

// loadRate is queries per second.
const loadRate = 1000

// load starts it: of each family three that keep their socket, one that takes a new
// one for every query, and one that asks over TCP.
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

// ask is one application, the nth of its family.
func (l *load) ask(server string, n int, interval time.Duration) {
	network := "udp"
	if n == 4 {
		network = "tcp"
	}
	var conn *dns.Conn
	defer func() {
		if conn != nil {
			_ = conn.Close() // no more is asked
		}
	}()
	for i := 0; ; i++ {
		select {
		case <-l.stop:
			return
		case <-time.After(time.Until(l.began.Add(time.Duration(i) * interval))): // late ones are made up for
		}
		name := mesh
		if i%2 == 1 {
			name = fmt.Sprintf("%d.%d.example.org", n, i) // cached nowhere
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

// askOn asks on a connection and returns the address that is the answer.
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

// note notes what became of a query.
func (l *load) note(address string, took time.Duration, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.slowest = max(l.slowest, took)
	if err != nil {
		address = fmt.Sprintf("lost after %v: %v", time.Since(l.began).Round(time.Millisecond), err)
	}
	l.answers[address]++
}

// of returns how many answers there are that are an address.
func (l *load) of(address string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.answers[address]
}

// more waits for answers that are this address.
func (v *vm) more(l *load, address string) {
	v.tb.Helper()
	want := l.of(address) + 100
	wait.Until(v.tb, "queries are answered with "+address, func() bool { return l.of(address) >= want })
}

// end ends it, and may be called again.
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
