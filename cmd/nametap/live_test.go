package main

import (
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
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
	one         *fakedns.Server // its nameserver
	dns, status string
	config      string
	environ     []string
	log         *testlog.Buffer
	process     *os.Process
}

// oneIP is the address in the answers of the nameserver.
const oneIP = "192.0.2.1"

// startLive starts an agent with a config file that names the nameserver, and waits until it is ready.
func startLive(t *testing.T, args ...string) *liveAgent {
	t.Helper()
	dir, ip := t.TempDir(), ownAddress(t)
	a := &liveAgent{
		tb: t, one: fakedns.Start(t, everywhere(oneIP)), dns: ip + ":25053", status: ip + ":25020",
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

// write replaces the config file. In text, ONE stands for the nameserver, which has an hour to reply unless text says
// otherwise.
func (a *liveAgent) write(text string) {
	a.tb.Helper()
	text = strings.ReplaceAll(text, "ONE", a.one.Addr.String())
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
