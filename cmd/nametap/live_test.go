package main

import (
	"bytes"
	"context"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/spf13/pflag"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/fakexds"
	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// everywhere answers every name with one address, except silent names.
func everywhere(ip string) fakedns.Handler {
	addr := netip.MustParseAddr(ip).AsSlice()
	return func(query *dns.Msg, _ string) *dns.Msg {
		q := query.Question[0]
		reply := new(dns.Msg).SetReply(query)
		if strings.HasSuffix(q.Name, ".silent.example.") {
			return nil
		}
		if q.Qtype == dns.TypeA {
			header := dns.RR_Header{Name: q.Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 3600}
			reply.Answer = []dns.RR{&dns.A{Hdr: header, A: addr}}
		}
		return reply
	}
}

// A liveAgent is a process of the real command, whose config file changes while clients query it.
type liveAgent struct {
	tb          testing.TB
	one, two    *fakedns.Server // nameservers
	xds         *fakexds.Server // the control plane
	dns, status string
	config      string
	environ     []string
	log         *testlog.Buffer
	process     *os.Process
	names       atomic.Int64 // that were asked for once
}

// The addresses in the answers of the nameservers: of the first one, and of the second one at first and later.
const oneIP, twoIP, laterIP = "192.0.2.1", "192.0.2.2", "192.0.2.3"

// startLive starts an agent with a config file, and waits until it is ready.
func startLive(t *testing.T, config string, args ...string) *liveAgent {
	t.Helper()
	dir := t.TempDir()
	a := &liveAgent{
		tb: t, one: fakedns.Start(t, everywhere(oneIP)), two: fakedns.Start(t, everywhere(twoIP)),
		config: filepath.Join(dir, "nametap.yaml"), log: testlog.New(t),
		environ: append(os.Environ(), "RUNTIME_DIRECTORY="+dir, "POD_NAME=web-0", "POD_NAMESPACE=ns1", "INSTANCE_IP=10.1.2.3", "NOTIFY_SOCKET="),
	}
	for _, address := range []*string{&a.dns, &a.status} {
		free, err := freeAddress()
		if err != nil {
			t.Fatal(err)
		}
		*address = free
	}
	a.xds = fakexds.Start(t, fakexds.Options{})
	a.xds.Push(&api.NameTable{Table: map[string]*api.NameTable_NameInfo{
		"web.ns1.svc.cluster.local": {Ips: []string{"10.0.0.1"}, Registry: "Kubernetes", Shortname: "web", Namespace: "ns1"},
		"db.corp.example":           {Ips: []string{"10.0.0.2"}, Registry: "External"},
	}})
	a.write(config)
	command := exec.Command(*randomAgent, append([]string{
		"agent", "--config", a.config, "--xds-addr", a.xds.Addr(), "--xds-plaintext", "--dns-addr", a.dns, "--status-addr", a.status,
		"--resolv-conf", filepath.Join(dir, "absent"), "--state-dir", filepath.Join(dir, "state"), "--drain", "0s",
	}, args...)...)
	command.Env, command.Stderr = a.environ, a.log
	command.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // without a terminal
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	a.process = command.Process
	t.Cleanup(func() {
		_ = command.Process.Signal(syscall.SIGTERM)
		if err := command.Wait(); err != nil {
			t.Errorf("%v\n%s", err, a.log)
		}
	})
	wait.Until(t, "the agent is ready", func() bool { return a.log.Count("msg=ready") > 0 })
	return a
}

// write replaces the config file. In text, ONE and TWO stand for the nameservers.
func (a *liveAgent) write(text string) {
	a.tb.Helper()
	text = strings.NewReplacer("ONE", a.one.Addr.String(), "TWO", a.two.Addr.String()).Replace(text)
	replaceFile(a.tb, a.config, text)
}

func replaceFile(tb testing.TB, path, text string) {
	tb.Helper()
	next := path + ".next"
	if err := os.WriteFile(next, []byte(text), 0o600); err != nil {
		tb.Fatal(err)
	}
	if err := os.Rename(next, path); err != nil {
		tb.Fatal(err)
	}
}

// once returns a name below a suffix that was not asked for before.
func (a *liveAgent) once(suffix string) string {
	return "n" + strconv.FormatInt(a.names.Add(1), 10) + "." + suffix
}

// ask returns the answer to a query for an A record as text: the response code, or the TTL and the
// addresses.
func (a *liveAgent) ask(name string) string {
	text, err := a.exchange(name)
	if err != nil {
		a.tb.Errorf("%s: %v", name, err)
	}
	return text
}

func (a *liveAgent) exchange(name string) (string, error) {
	client := dns.Client{Timeout: wait.Limit}
	reply, _, err := client.Exchange(new(dns.Msg).SetQuestion(dns.Fqdn(name), dns.TypeA), a.dns)
	switch {
	case err != nil:
		return "", err
	case len(reply.Answer) == 0 && reply.Rcode == dns.RcodeSuccess:
		return "NODATA", nil
	case len(reply.Answer) == 0:
		return dns.RcodeToString[reply.Rcode], nil
	}
	texts := []string{strconv.FormatUint(uint64(reply.Answer[0].Header().Ttl), 10)}
	for _, rr := range reply.Answer {
		if address, ok := rr.(*dns.A); ok {
			texts = append(texts, address.A.String())
		}
	}
	return strings.Join(texts, " "), nil
}

// underLoad runs f while clients send 500 queries a second: of four, one is for a mesh name, one for a name
// in the cache and two for names that must be forwarded. Each has to get an answer with an address.
func (a *liveAgent) underLoad(f func()) {
	const interval = 2 * time.Millisecond
	ctx, stop := context.WithCancel(context.Background())
	var clients sync.WaitGroup
	var sent, lost atomic.Int64
	clients.Go(func() {
		ticker := time.NewTicker(interval)
		defer ticker.Stop()
		for i := 0; ; i++ {
			select {
			case <-ticker.C:
			case <-ctx.Done():
				return
			}
			name := [...]string{"web", "hot.load.example", a.once("load.example"), a.once("other.example")}[i%4]
			clients.Go(func() {
				sent.Add(1)
				answer, err := a.exchange(name)
				if err != nil || !strings.Contains(answer, ".") {
					lost.Add(1)
					a.tb.Errorf("%s: %q, %v", name, answer, err)
				}
			})
		}
	})
	begun := time.Now()
	func() {
		defer clients.Wait() // also if f ends the test
		defer stop()
		f()
	}()
	took := time.Since(begun)
	a.tb.Logf("%d queries in %s, %d without an answer", sent.Load(), took.Round(time.Millisecond), lost.Load())
	if sent.Load() < int64(took/interval/4) {
		a.tb.Errorf("%d queries in %s are no load", sent.Load(), took)
	}
}

// takes waits until a change is in use, and checks that this takes a second. The machine may be busy, so it
// allows as much again.
func (a *liveAgent) takes(what string, change func(), inUse func() bool) {
	a.tb.Helper()
	begun := time.Now()
	change()
	wait.Until(a.tb, what, inUse)
	took := time.Since(begun)
	a.tb.Logf("%s: after %s", what, took.Round(time.Millisecond))
	if took > 2*time.Second {
		a.tb.Errorf("%s: after %s, want 1 s", what, took)
	}
}

// showStatus returns what `nametap status` prints.
func (a *liveAgent) showStatus() string {
	command := exec.Command("nametap", "status", "--status-addr", a.status)
	command.Env = a.environ
	out, err := command.CombinedOutput()
	if err != nil {
		a.tb.Errorf("nametap status: %v: %s", err, out)
	}
	return string(out)
}

// R10: settings of forwarding and of answers are in use within 1 s after the config file has changed, and no
// query is lost. Cached replies stay, except those of other nameservers. A wrong value changes nothing.
func TestSettingsChangeUnderLoad(t *testing.T) {
	t.Parallel()
	a := startLive(t, "upstream: [ONE]\n")
	const kept, moved = "kept.example", "kept.corp.example"
	const limits = "upstream: [TWO]\ncache-size: 16MiB\nserve-stale: 0s\nupstream-order: fastest\n"
	is := func(name, want string) func() bool { return func() bool { return a.ask(name) == want } }
	a.underLoad(func() {
		a.ask(kept)
		a.takes("another nameserver", func() { a.write("upstream: [TWO]\n") },
			func() bool { return a.ask(a.once("example")) == "3600 "+twoIP })
		// The cached reply is flushed, since another nameserver is asked now (F17).
		for _, name := range []string{kept, moved} {
			if answer := a.ask(name); !strings.HasSuffix(answer, " "+twoIP) {
				t.Errorf("%s is %s, want the answer of the next nameserver", name, answer)
			}
		}
		a.two.Handle(everywhere(laterIP))
		a.takes("a nameserver for a suffix", func() { a.write("upstream: [TWO, corp.example=ONE]\n") },
			func() bool { return a.ask(a.once("corp.example")) == "3600 "+oneIP })
		if answer := a.ask(moved); !strings.HasSuffix(answer, " "+oneIP) {
			t.Errorf("%s is %s, want the answer of the nameserver of its suffix", moved, answer)
		}
		a.takes("the TTL", func() { a.write("upstream: [TWO, corp.example=ONE]\nttl: 7s\n") }, is("web", "7 10.0.0.1"))
		a.takes("a bypassed suffix", func() { a.write("upstream: [TWO, corp.example=ONE]\nttl: 7s\nbypass: [db.corp.example]\n") },
			is("db.corp.example", "3600 "+oneIP))
		for wrong, named := range map[string]string{
			"upstream: [nowhere]\n": `upstream: \"nowhere\"`,
			"upstream: [TWO, a.example=ONE]\nlocal-only: [a..example]\n": `local-only \"a..example\"`,
			"ttl: 1ns\n": "TTL 1ns", "upstream-root-ca: /absent\n": "upstream-root-ca: reading root certificates: open /absent",
		} {
			a.write(wrong)
			wait.Until(t, "the log names "+named, func() bool { return a.log.Count("the settings stay unchanged", named) > 0 })
		}
		if got := []string{a.ask(a.once("example")), a.ask(a.once("a.example")), a.ask("web")}; !slices.Equal(got, []string{"3600 " + laterIP, "3600 " + laterIP, "7 10.0.0.1"}) {
			t.Errorf("after wrong values %q", got)
		}
		a.takes("a local-only suffix", func() { a.write("upstream: [TWO, corp.example=ONE]\nlocal-only: [corp.example]\n") },
			func() bool { return a.ask(a.once("corp.example")) == "NXDOMAIN" })
		for name, want := range map[string]string{"db.corp.example": "30 10.0.0.2", "corp.example": "NODATA", moved: "NXDOMAIN"} {
			if answer := a.ask(name); answer != want {
				t.Errorf("%s is %s, want %s", name, answer, want)
			}
		}
		// The nameserver has changed its answer since the reply was cached, and its names have been asked of it
		// all the time.
		a.takes("limits", func() { a.write(limits) }, func() bool { return a.log.Count("name=cache-size from=8MiB to=16MiB") > 0 })
		if answer := a.ask(kept); !strings.HasSuffix(answer, " "+twoIP) {
			t.Errorf("%s is %s, want the cached reply", kept, answer)
		}
	})
	a.write(limits + "upstream-timeout: 300ms\n")
	wait.Until(t, "the timeout", func() bool { return a.log.Count("name=upstream-timeout from=4s to=300ms") > 0 })
	if answer := a.ask(a.once("silent.example")); answer != "SERVFAIL" {
		t.Errorf("a name without an answer is %s", answer)
	}
	begun := time.Now()
	a.ask(a.once("silent.example"))
	if took := time.Since(begun); took < 300*time.Millisecond || took > 2*time.Second {
		t.Errorf("a query without an answer takes %s, want 300 ms", took)
	}
	status := a.showStatus()
	for _, want := range []string{"cache-size: 16MiB", "upstream-order: fastest", "upstream: " + a.two.Addr.String() + "\n"} {
		if !strings.Contains(status, want) {
			t.Errorf("nametap status lacks %q:\n%s", want, status)
		}
	}
	for _, want := range []string{"name=ttl from=30s to=7s", "name=ttl from=7s to=30s", "name=local-only from=[] to=[corp.example]", "name=upstream-timeout from=4s to=300ms"} {
		wait.Until(t, "the log has once "+want, func() bool { return a.log.Count("level=INFO", `msg="setting changed"`, want) == 1 })
	}
	if n := a.log.Count("takes effect after a restart"); n > 0 {
		t.Errorf("%d changes wait for a restart", n)
	}
}

// R10: SIGHUP makes the agent use its settings at once. A longer timeout holds for late replies, a shorter
// one not for the queries in flight. Settings of the mesh config change in the same way.
func TestSettingsChangeBySignal(t *testing.T) {
	t.Parallel()
	mesh := filepath.Join(t.TempDir(), "mesh")
	replaceFile(t, mesh, "{}\n")
	a := startLive(t, "upstream: [ONE]\nupstream-timeout: 100ms\n", "--mesh-config", mesh)
	hangup := func() {
		t.Helper()
		n := a.log.Count("SIGHUP: reading the settings again")
		if err := a.process.Signal(syscall.SIGHUP); err != nil {
			t.Fatal(err)
		}
		wait.Until(t, "SIGHUP", func() bool { return a.log.Count("SIGHUP: reading the settings again") > n })
	}
	a.write("upstream: [TWO]\nupstream-timeout: 20s\n")
	hangup()
	a.takes("another nameserver", func() {}, func() bool { return a.ask(a.once("example")) == "3600 "+twoIP })
	const late = 1500 * time.Millisecond // longer than the first timeout
	a.two.Handle(everywhere(twoIP), fakedns.Delay(late))
	if answer := a.ask(a.once("example")); answer != "3600 "+twoIP {
		t.Errorf("a reply after %s, with a timeout of 20 s: %s", late, answer)
	}
	inFlight := a.once("example")
	answered := make(chan string)
	go func() { answered <- a.ask(inFlight) }()
	wait.Until(t, "the query", func() bool {
		return slices.ContainsFunc(a.two.Queries(), func(q fakedns.Query) bool { return q.Name == dns.Fqdn(inFlight) })
	})
	a.write("upstream: [TWO]\nupstream-timeout: 200ms\n")
	hangup()
	if answer := wait.For(t, "the answer", answered); answer != "3600 "+twoIP {
		t.Errorf("a query in flight at the change gets %s", answer)
	}
	if answer := a.ask(a.once("example")); answer != "SERVFAIL" {
		t.Errorf("a reply after %s, with a timeout of 200 ms: %s", late, answer)
	}
	a.two.Handle(everywhere(twoIP))
	a.takes("a setting of the mesh config", func() {
		replaceFile(t, mesh, "defaultConfig: {proxyMetadata: {NAMETAP_TTL: 9s, DNS_FORWARD_TIMEOUT: 5s}}\n")
	}, func() bool { return a.ask("web") == "9 10.0.0.1" })
	wait.Until(t, "the timeout of the mesh config wins", func() bool { return a.log.Count("name=upstream-timeout from=200ms to=5s") == 1 })
}

// R10: the documents say which settings take effect while the agent runs.
func TestLiveSettingsDocumented(t *testing.T) {
	operations, err := os.ReadFile("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	var row []byte
	for line := range bytes.Lines(operations) {
		if bytes.HasPrefix(line, []byte("| `--log-level`")) {
			row = line
		}
	}
	newOptions(pflag.NewFlagSet("test", pflag.ContinueOnError)).flags.VisitAll(func(flag *pflag.Flag) {
		group, _, grouped := strings.Cut(flag.Name, "-")
		named := bytes.Contains(row, []byte("`--"+flag.Name+"`")) || grouped && bytes.Contains(row, []byte("`--"+group+"-…`"))
		if live := isLive(flag.Name); live != named {
			t.Errorf("%s takes effect while the agent runs: %v; the row of docs/operations.md: %s", flag.Name, live, row)
		}
	})
}
