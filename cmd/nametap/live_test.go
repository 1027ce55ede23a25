package main

import (
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/miekg/dns"

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

// A liveAgent is a process of the real command, whose config file changes.
type liveAgent struct {
	tb          testing.TB
	one, two    *fakedns.Server // nameservers
	dns, status string
	config      string
	environ     []string
	log         *testlog.Buffer
	process     *os.Process
	names       atomic.Int64 // that were asked for once
}

// The addresses in the answers of the nameservers: of the first one, and of the second one at first and later.
const oneIP, twoIP, laterIP = "192.0.2.1", "192.0.2.2", "192.0.2.3"

// startLive starts an agent with a config file that names the first nameserver, and waits until it is ready.
func startLive(t *testing.T, args ...string) *liveAgent {
	t.Helper()
	dir, ip := t.TempDir(), ownAddress(t)
	a := &liveAgent{
		tb: t, one: fakedns.Start(t, everywhere(oneIP)), two: fakedns.Start(t, everywhere(twoIP)), dns: ip + ":25053", status: ip + ":25020",
		config: filepath.Join(dir, "nametap.yaml"), log: testlog.New(t),
		environ: []string{"PATH=" + os.Getenv("PATH"), "RUNTIME_DIRECTORY=" + dir, "POD_NAME=web-0", "POD_NAMESPACE=ns1", "INSTANCE_IP=10.1.2.3"},
	}
	xds := fakexds.Start(t, fakexds.Options{})
	xds.Push(&api.NameTable{Table: map[string]*api.NameTable_NameInfo{
		"web.ns1.svc.cluster.local": {Ips: []string{"10.0.0.1"}, Registry: "Kubernetes", Shortname: "web", Namespace: "ns1"},
		"db.corp.example":           {Ips: []string{"10.0.0.2"}, Registry: "External"},
	}})
	a.write("upstream: [ONE]\n")
	signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP) // under nohup, the agent would ignore it, as this process does
	command := exec.Command("nametap", append([]string{
		"agent", "--config", a.config, "--xds-addr", xds.Addr(), "--xds-plaintext", "--dns-addr", a.dns, "--status-addr", a.status,
		"--resolv-conf", filepath.Join(dir, "absent"), "--state-dir", filepath.Join(dir, "state"), "--drain", "0s",
	}, args...)...)
	command.Env, command.Stderr = a.environ, a.log
	command.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL} // without a terminal, and its ^C
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

// write replaces the config file. In text, ONE and TWO stand for the nameservers, which have an hour to reply unless text
// says otherwise.
func (a *liveAgent) write(text string) {
	a.tb.Helper()
	text = strings.NewReplacer("ONE", a.one.Addr.String(), "TWO", a.two.Addr.String()).Replace(text)
	if !strings.Contains(text, "upstream-timeout") {
		text += "upstream-timeout: 1h\n"
	}
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

// set replaces the config file, and lets the agent read it. The settings are in use when set returns.
func (a *liveAgent) set(text string) {
	a.tb.Helper()
	a.write(text)
	a.hangUp()
}

// hangUp lets the agent read its settings, and waits until it has: it takes the second signal afterwards.
func (a *liveAgent) hangUp() {
	a.tb.Helper()
	for range 2 {
		const line = "SIGHUP: reading the settings again"
		n := a.log.Count(line)
		if err := a.process.Signal(syscall.SIGHUP); err != nil {
			a.tb.Fatal(err)
		}
		wait.Until(a.tb, "the agent takes the signal", func() bool { return a.log.Count(line) > n })
	}
}

// once returns a name below a suffix that was not asked for before.
func (a *liveAgent) once(suffix string) string {
	return "n" + strconv.FormatInt(a.names.Add(1), 10) + "." + suffix
}

// ask returns the answer to a query for an A record as text: the response code, or the TTL and the
// addresses.
func (a *liveAgent) ask(name string) string {
	client := dns.Client{Timeout: patience}
	reply, _, err := client.Exchange(new(dns.Msg).SetQuestion(dns.Fqdn(name), dns.TypeA), a.dns)
	switch {
	case err != nil:
		a.tb.Errorf("%s: %v", name, err)
		return err.Error()
	case len(reply.Answer) == 0 && reply.Rcode == dns.RcodeSuccess:
		return "NODATA"
	case len(reply.Answer) == 0:
		return dns.RcodeToString[reply.Rcode]
	}
	texts := []string{strconv.FormatUint(uint64(reply.Answer[0].Header().Ttl), 10)}
	for _, rr := range reply.Answer {
		if address, ok := rr.(*dns.A); ok {
			texts = append(texts, address.A.String())
		}
	}
	return strings.Join(texts, " ")
}

// R10: settings of forwarding, of answers and of the mesh config change while the agent runs: when their file changes,
// and on SIGHUP. Cached replies stay, except those of other nameservers. A wrong value changes nothing. Another timeout
// does not hold for the queries in flight.
func TestSettingsChange(t *testing.T) {
	t.Parallel()
	mesh := filepath.Join(t.TempDir(), "mesh")
	replaceFile(t, mesh, "{}\n")
	a := startLive(t, "--mesh-config", mesh)
	const kept, moved = "kept.example", "kept.corp.example"
	expect := func(what string, answers map[string]string) {
		t.Helper()
		for name, want := range answers {
			if answer := a.ask(name); answer != want && !strings.HasSuffix(answer, " "+want) {
				t.Errorf("%s: %s is %s, want %s", what, name, answer, want)
			}
		}
	}
	expect("at first", map[string]string{kept: oneIP, "web": "30 10.0.0.1", "db.corp.example": "30 10.0.0.2"})
	a.write("upstream: [TWO]\n")
	wait.Until(t, "another nameserver is in use", func() bool { return strings.HasSuffix(a.ask(a.once("example")), " "+twoIP) })
	// The cached reply is flushed, since another nameserver is asked now (F17).
	expect("another nameserver", map[string]string{kept: twoIP, moved: twoIP})
	a.set("upstream: [TWO, corp.example=ONE]\n")
	expect("a nameserver for a suffix", map[string]string{a.once("corp.example"): oneIP, moved: oneIP, kept: twoIP})
	a.two.Handle(everywhere(laterIP))
	a.set("upstream: [TWO, corp.example=ONE]\nttl: 7s\nbypass: [db.corp.example]\n")
	expect("the TTL and a bypassed suffix", map[string]string{"web": "7 10.0.0.1", "db.corp.example": oneIP})
	for wrong, named := range map[string]string{
		"upstream: [nowhere]\n": `upstream: \"nowhere\"`,
		"upstream: [TWO, a.example=ONE]\nlocal-only: [a..example]\n": `local-only \"a..example\"`,
		"ttl: 1ns\n": "TTL 1ns", "upstream-root-ca: /absent\n": "upstream-root-ca: reading root certificates: open /absent",
	} {
		a.set(wrong)
		if a.log.Count("the settings stay unchanged", named) == 0 {
			t.Errorf("the log does not name %s:\n%s", named, a.log)
		}
	}
	expect("after wrong values", map[string]string{a.once("example"): laterIP, a.once("a.example"): laterIP, "web": "7 10.0.0.1"})
	a.set("upstream: [TWO, corp.example=ONE]\nlocal-only: [corp.example]\n")
	expect("a local-only suffix", map[string]string{
		a.once("corp.example"): "NXDOMAIN", moved: "NXDOMAIN", "db.corp.example": "30 10.0.0.2", "corp.example": "NODATA",
	})
	const limits = "upstream: [TWO, corp.example=ONE]\ncache-size: 16MiB\nserve-stale: 0s\nupstream-order: fastest\n"
	a.set(limits)
	// The nameserver has changed its answer since the reply was cached.
	expect("a cached reply", map[string]string{kept: twoIP})

	held := make(chan struct{})
	a.two.Handle(func(query *dns.Msg, network string) *dns.Msg {
		<-held
		return everywhere(twoIP)(query, network)
	})
	inFlight, answered := a.once("example"), make(chan string, 1)
	go func() { answered <- a.ask(inFlight) }()
	wait.Until(t, "the nameserver is asked", func() bool {
		return slices.ContainsFunc(a.two.Queries(), func(q fakedns.Query) bool { return q.Name == dns.Fqdn(inFlight) })
	})
	a.set(limits + "upstream-timeout: 50ms\n")
	expect("a short timeout", map[string]string{a.once("silent.example"): "SERVFAIL"})
	close(held)
	if answer := wait.For(t, "the answer", answered); !strings.HasSuffix(answer, " "+twoIP) {
		t.Errorf("a query in flight at the change gets %s", answer)
	}
	status := exec.Command("nametap", "status", "--status-addr", a.status)
	status.Env = a.environ
	shown, err := status.CombinedOutput()
	for _, want := range []string{"cache-size: 16MiB", "upstream-order: fastest", "upstream: " + a.two.Addr.String() + ", "} {
		if err != nil || !strings.Contains(string(shown), want) {
			t.Errorf("nametap status lacks %q: %v\n%s", want, err, shown)
		}
	}
	a.set("upstream: [TWO]\n")
	replaceFile(t, mesh, "defaultConfig: {proxyMetadata: {NAMETAP_TTL: 9s, DNS_FORWARD_TIMEOUT: 2h}}\n")
	a.hangUp()
	expect("the mesh config", map[string]string{"web": "9 10.0.0.1"})
	for _, want := range []string{
		"name=ttl from=30s to=7s", "name=ttl from=7s to=30s", "name=local-only from=[] to=[corp.example]",
		"name=upstream-timeout from=1h0m0s to=50ms", "name=upstream-timeout from=1h0m0s to=2h0m0s", // that of the mesh config wins
	} {
		if n := a.log.Count("level=INFO", `msg="setting changed"`, want); n != 1 {
			t.Errorf("the log has %d times %q:\n%s", n, want, a.log)
		}
	}
	if n := a.log.Count("takes effect after a restart"); n > 0 {
		t.Errorf("%d changes wait for a restart", n)
	}
}
