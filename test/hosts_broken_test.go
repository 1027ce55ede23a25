package test

import (
	"bytes"
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
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
	"github.com/nametap/nametap/internal/testkit/wait"
)

// R15: what doctor says first on hosts that are broken.
func TestBrokenHosts(t *testing.T) {
	t.Parallel()
	netns.Need(t, "unshare", "dnsmasq", "nft")
	examine(t, brokenHosts(), func(e *examined, c hostCase) {
		if c.raises != "" {
			wait.Until(e.tb, "the agent raises "+c.raises, func() bool { return strings.Contains(e.health(), ": "+c.raises+": ") })
		}
		e.becomes(c.says)
		if e.mend != nil {
			e.mend()
			mended := time.Now()
			e.becomes("")
			e.tb.Logf("%s: doctor says nothing %v after the end", e.tb.Name(), time.Since(mended).Round(time.Second))
		}
	})
}

func brokenHosts() []hostCase {
	return slices.Concat(brokenCapture(), brokenServers(), brokenLocally(), brokenControl()) // what takes longest first
}

func brokenLocally() []hostCase {
	return []hostCase{
		{name: "no agent runs", says: "PROBLEM  no agent answers on this host", make: func(e *examined) { e.mend = func() { e.agent() } }},
		{name: "another program has the port", says: "PROBLEM  no agent answers on this host, and dnsmasq (process N) has its port", make: func(e *examined) {
			e.program("dnsmasq", "--no-daemon", "--conf-file=/dev/null", "--no-resolv", "--port=15053", "--listen-address=127.0.0.1,::1", "--bind-interfaces")
			e.listens("[::1]:15053")
			e.launch()
		}},
		{name: "the unit has failed", says: "PROBLEM  no agent answers on this host", make: func(e *examined) {
			e.unit("LoadState=loaded", "ActiveState=failed", "SubState=failed", "Result=exit-code", "NRestarts=7")
		}},
		{name: "settings do not parse", says: "PROBLEM  a setting of this command cannot be used", make: func(e *examined) {
			e.args = []string{"--config", e.write("config.yaml", "upstream: [oops\n")}
			e.launch(e.args...)
		}},
		{name: "the unit's settings do not parse", says: "PROBLEM  a setting of nametap.service (/etc/default/nametap) cannot be used", make: func(e *examined) {
			e.files["/etc/default"] = e.folder("default", "nametap", "NAMETAP_UPSTREAM=nonsense\n")
		}},
		{name: "settings were changed and do not parse", says: "WARNING  the settings files have changed, and cannot be used", make: func(e *examined) {
			config := e.write("config.yaml", "cache-size: 1MiB\n")
			e.agent("--config", config)
			e.replace("config.yaml", "cache-size: many\n")
			e.mend = func() { e.replace("config.yaml", "cache-size: 2MiB\n") }
		}},
		{name: "settings were changed that need a restart", says: "WARNING  settings have changed that take effect after a restart: --egress-mark", make: func(e *examined) {
			config := e.write("config.yaml", "cache-size: 1MiB\n")
			e.agent("--config", config)
			e.replace("config.yaml", "cache-size: 1MiB\negress-mark: 7\n")
			e.mend = func() { e.replace("config.yaml", "cache-size: 1MiB\n") }
		}},
		{name: "a settings file is not readable", says: "WARNING  the settings files have changed, and cannot be used", make: func(e *examined) {
			config := e.write("config.yaml", "cache-size: 1MiB\n")
			e.agent("--config", config)
			e.Exec("chmod", "0600", config)
			e.mend = func() { e.Exec("chmod", "0644", config) }
		}},
		{name: "the listener is firewalled", says: "PROBLEM  DNS listeners of the agent do not answer", raises: "listener_silent", make: func(e *examined) {
			e.agent()
			e.drops("INPUT", "-p", "udp", "--dport", "15053")
		}},
		{name: "a listener's port is taken", says: "WARNING  a DNS listener cannot be opened; retrying: tcp6 [::1]:15053", make: func(e *examined) {
			e.program("dnsmasq", "--no-daemon", "--conf-file=/dev/null", "--no-resolv", "--port=15053", "--listen-address=::1", "--bind-interfaces")
			e.listens("[::1]:15053")
			e.agent()
		}},
		{name: "the state directory is not writable", says: "WARNING  the table cannot be saved in DIR/state", make: func(e *examined) {
			state := e.agentDir("state")
			e.agent("--state-dir", state)
			e.saved(state)
			e.Exec("chown", "-R", "0:0", state)
			e.pushes()
		}},
		{name: "the state directory is full", says: "WARNING  the table cannot be saved in DIR/state", make: func(e *examined) {
			e.agent("--state-dir", e.full())
			e.saved(filepath.Join(e.dir, "state"))
			e.Exec("sh", "-c", "cat /dev/zero >"+filepath.Join(e.dir, "state", "fills")+" || true")
			e.pushes()
		}},
		{name: "resolv.conf is missing", says: "PROBLEM  DIR/resolv.conf cannot be read", make: func(e *examined) {
			e.agent("--upstream", named)
			e.Exec("rm", e.resolvConf)
			e.mend = func() { e.replace("resolv.conf", "nameserver "+named+"\n") }
		}},
		{name: "resolv.conf is empty", says: "PROBLEM  DIR/resolv.conf names no nameserver", make: func(e *examined) {
			e.agent()
			e.replace("resolv.conf", "")
			e.mend = func() { e.replace("resolv.conf", "nameserver "+named+"\n") }
		}},
		{name: "resolv.conf has four nameservers", says: "WARNING  DIR/resolv.conf names 4 nameservers, but programs use only three", make: func(e *examined) {
			e.replace("resolv.conf", fmt.Sprintf("nameserver %s\nnameserver %s\nnameserver %s\nnameserver %s\n", named, other, named6, other6))
			e.agent()
		}},
		{name: "resolv.conf is a dangling link", says: "PROBLEM  DIR/resolv.conf cannot be read", make: func(e *examined) {
			e.Exec("ln", "-sf", "/run/nowhere/resolv.conf", e.resolvConf)
			e.agent()
		}},
		{name: "resolv.conf has only the agent", says: "PROBLEM  the agent has no nameserver", make: func(e *examined) {
			e.replace("resolv.conf", "nameserver 127.0.0.1\n")
			e.flags, e.capabilities = append(e.flags, "--dns-addr", "127.0.0.1:53"), append(e.capabilities, capNetBindService)
			e.agent()
		}},
		{name: "nsswitch.conf has no dns", says: "PROBLEM  /etc/nsswitch.conf has no dns for hosts", make: func(e *examined) {
			e.files["/etc/nsswitch.conf"] = "hosts: files myhostname\n"
			e.agent()
		}},
		{name: "nsswitch.conf asks mDNS", says: "WARNING  /etc/nsswitch.conf asks mDNS for names below .local, and then no other service", make: func(e *examined) {
			e.files["/etc/nsswitch.conf"] = "hosts: files mdns4_minimal [NOTFOUND=return] dns\n"
			e.files["/run"] = e.folder("run/avahi-daemon", "socket", "") + "/.."
			e.agent()
		}},
		{name: "no descriptor is free", says: "PROBLEM  the agent has no free descriptors", make: func(e *examined) {
			e.sameUser = true
			a := e.agent()
			a.limitFiles(a.freeFile())
			e.mend = func() { a.limitFiles(1024) }
		}},
		{name: "memory is nearly used up", says: "WARNING  the memory of the agent is nearly at its limit", make: func(e *examined) {
			group := e.folder("cgroup", "memory.max", "100000000\n")
			e.write("cgroup/memory.current", "99000000\n")
			e.write("cgroup/memory.stat", "anon 98000000\nfile 1000000\n")
			e.files["/sys/fs/cgroup"], e.files["/proc/self/cgroup"] = group, "0::/\n"
			e.agentSeeing()
		}},
		{name: "the agent is of an older version", says: "WARNING  the running agent has another version than this command", make: func(e *examined) {
			e.agent()
			e.olderAgent()
		}},
		{name: "conntrack is full", says: "PROBLEM  the connection tracking of the kernel is full", make: func(e *examined) {
			e.sameUser = true
			e.Exec("iptables-nft", "-t", "nat", "-A", "OUTPUT", "-p", "tcp", "-m", "conntrack", "--ctstate", "NEW", "-j", "RETURN")
			e.files["/proc/sys/net/netfilter/nf_conntrack_max"] = "1"
			e.agentSeeing()
		}},
	}
}

func brokenControl() []hostCase {
	secure := func(e *examined, flags ...string) { e.agents = append([]string{"--xds-plaintext=false"}, flags...) }
	authority := func(e *examined) *fakexds.Authority {
		return fakexds.NewAuthority(e.tb, "istiod.istio-system.svc", "spiffe://cluster.local/ns/shop/sa/default")
	}
	root := func(e *examined, a *fakexds.Authority) string { return e.write("root.pem", a.Root()) }
	withToken := func(e *examined, issued, expires time.Duration) {
		a := authority(e)
		e.control(fakexds.Options{Authority: a, Token: "another"})
		secure(e, "--xds-root-ca", root(e, a), "--workload-cert", "off", "--xds-token-file", e.write("token", token(issued, expires)))
	}
	return []hostCase{
		{name: "the token has expired", says: "PROBLEM  the token for the control plane has expired", make: func(e *examined) {
			withToken(e, -2*time.Hour, -time.Hour)
			e.launch(e.agents...)
		}},
		{name: "the token expires soon", says: "WARNING  the token for the control plane expires in T, and nothing has replaced it", make: func(e *examined) {
			withToken(e, -time.Hour, 5*time.Minute)
			e.xds.SetToken(token(-time.Hour, 5*time.Minute))
			e.pushes()
			e.launch(e.agents...)
		}},
		{name: "the clock is behind", says: "PROBLEM  the clock of this host is at least T behind that of the cluster", make: func(e *examined) {
			withToken(e, time.Hour, 2*time.Hour)
			e.launch(e.agents...)
		}},
		{name: "the token is refused", says: "PROBLEM  the control plane 127.0.0.1:15012 refuses the agent", make: func(e *examined) {
			withToken(e, -time.Minute, time.Hour)
			e.launch(e.agents...)
		}},
		{name: "the token is missing", says: "PROBLEM  the agent cannot read the token (--xds-token-file)", make: func(e *examined) {
			withToken(e, -time.Minute, time.Hour)
			e.Exec("rm", filepath.Join(e.dir, "token"))
			e.launch(e.agents...)
		}},
		{name: "the token is not readable", says: "PROBLEM  the agent cannot read the token (--xds-token-file)", make: func(e *examined) {
			withToken(e, -time.Minute, time.Hour)
			e.Exec("chmod", "0600", filepath.Join(e.dir, "token"))
			e.launch(e.agents...)
		}},
		{name: "the control plane has another authority", says: "PROBLEM  the agent does not accept the certificate of the control plane 127.0.0.1:15012", make: func(e *examined) {
			e.control(fakexds.Options{Authority: authority(e)})
			secure(e, "--xds-root-ca", root(e, authority(e)), "--xds-token-file", "")
			e.launch(e.agents...)
		}},
		{name: "the client certificate is refused", says: "PROBLEM  the control plane 127.0.0.1:15012 refuses the agent", make: func(e *examined) {
			a := authority(e)
			e.control(fakexds.Options{Authority: a, RefuseCertificates: true})
			certificate, key := a.Client()
			secure(e, "--xds-root-ca", root(e, a), "--xds-token-file", "", "--xds-cert", e.write("cert.pem", certificate), "--xds-key", e.write("key.pem", key))
			e.launch(e.agents...)
		}},
		{name: "the control plane's name does not resolve", says: "PROBLEM  the name of the control plane istiod.istio-system.svc:15012 does not resolve", make: func(e *examined) {
			e.named.Handle(fakedns.Answer())
			e.files["/etc/resolv.conf"] = e.resolvConf
			e.agentSeeing("--xds-addr", "istiod.istio-system.svc:15012")
		}},
		{name: "no nameserver resolves the control plane", says: "PROBLEM  10.0.0.53, the only nameserver, does not reply", make: func(e *examined) {
			e.named.Handle(fakedns.Silence)
			e.files["/etc/resolv.conf"] = e.resolvConf
			e.agentSeeing("--xds-addr", "istiod.istio-system.svc:15012")
			e.asks(10, dnsAddr, numbered)
		}},
		{name: "the control plane refuses connections", says: "PROBLEM  the control plane 127.0.0.1:15012 refuses connections", make: func(e *examined) {
			e.launch("--xds-addr", controlAddr)
		}},
		{name: "the control plane is cut off", says: "PROBLEM  the control plane 127.0.0.1:15012 does not answer", make: func(e *examined) {
			e.Exec("iptables-nft", "-A", "OUTPUT", "-p", "tcp", "--dport", "15012", "-j", "DROP")
			e.launch("--xds-addr", controlAddr)
		}},
		{name: "the control plane answers no TLS", says: "PROBLEM  the control plane 127.0.0.1:15012 accepts connections, but does not answer TLS", make: func(e *examined) {
			e.accepts(controlAddr)
			secure(e, "--xds-root-ca", root(e, authority(e)), "--xds-token-file", "", "--xds-addr", controlAddr)
			e.launch(e.agents...)
		}},
		{name: "the control plane lost its connection", says: "WARNING  the control plane 127.0.0.1:15012 refuses connections", make: func(e *examined) {
			e.control(fakexds.Options{})
			e.xds.Push(&api.NameTable{})
			e.agent()
			e.xds.Stop()
		}},
		{name: "a push is rejected", says: "WARNING  the agent rejects the table of the control plane 127.0.0.1:15012", make: func(e *examined) {
			e.control(fakexds.Options{})
			e.xds.Push(&api.NameTable{})
			e.agent()
			e.xds.PushBytes([]byte{0xff})
			e.mend = e.pushes
		}},
		{name: "no push comes", says: "PROBLEM  the control plane 127.0.0.1:15012 has sent no table", make: func(e *examined) {
			e.control(fakexds.Options{})
			e.launch()
			e.mend = e.pushes
		}},
		{name: "the table is stale", says: "PROBLEM  mesh names are T old: from the snapshot", make: func(e *examined) {
			state := e.agentDir("state")
			first := e.agent("--state-dir", state)
			e.saved(state)
			first.end(syscall.SIGTERM)
			e.control(fakexds.Options{})
			e.agent("--state-dir", state)
		}},
	}
}

// token returns a JSON Web Token that was issued, and expires, a time from now.
func token(issued, expires time.Duration) string {
	part := func(text string) string { return base64.RawURLEncoding.EncodeToString([]byte(text)) }
	now := time.Now()
	return part(`{"alg":"none"}`) + "." + part(fmt.Sprintf(`{"iat":%d,"exp":%d}`, now.Add(issued).Unix(), now.Add(expires).Unix())) + "." + part("x")
}

func brokenServers() []hostCase {
	two := func(e *examined) { e.replace("resolv.conf", "nameserver "+named+"\nnameserver "+other+"\n") }
	asked := func(e *examined) {
		e.agent()
		e.asks(10, dnsAddr, numbered)
	}
	return []hostCase{
		{name: "the only nameserver refuses", says: "PROBLEM  10.0.0.53, the only nameserver, does not reply", make: func(e *examined) {
			e.named.Close()
			asked(e)
			e.mend = func() { e.opens(e.named) }
		}},
		{name: "the only nameserver is silent", says: "PROBLEM  10.0.0.53, the only nameserver, does not reply", make: func(e *examined) {
			e.named.Handle(fakedns.Silence)
			asked(e)
			e.mend = func() { e.named.Handle(anyName(namedIP)) }
		}},
		{name: "the first nameserver is silent", says: "WARNING  10.0.0.53, the first nameserver, does not reply", make: func(e *examined) {
			two(e)
			e.named.Handle(fakedns.Silence)
			asked(e)
		}},
		{name: "the first nameserver answers REFUSED", says: "WARNING  10.0.0.53, the first nameserver, answers no query", make: func(e *examined) {
			two(e)
			e.named.Handle(fakedns.Rcode(dns.RcodeRefused))
			asked(e)
		}},
		{name: "the only nameserver answers SERVFAIL", says: "PROBLEM  10.0.0.53, the only nameserver, answers no query", make: func(e *examined) {
			e.named.Handle(fakedns.Rcode(dns.RcodeServerFailure))
			asked(e)
			e.mend = func() { e.named.Handle(anyName(namedIP)) }
		}},
		{name: "the second nameserver is silent", says: "WARNING  10.0.0.54, the second nameserver, does not reply", make: func(e *examined) {
			two(e)
			e.other.Handle(fakedns.Silence)
			e.named.Handle(fakedns.Rcode(dns.RcodeServerFailure), fakedns.Sometimes(0.7, 1, instead(namedIP)))
			asked(e)
		}},
		{name: "no nameserver replies", says: "PROBLEM  10.0.0.53, the first nameserver, does not reply", make: func(e *examined) {
			two(e)
			e.named.Handle(fakedns.Silence)
			e.other.Close()
			asked(e)
		}},
		{name: "the nameserver of a suffix is silent", says: "PROBLEM  10.0.0.54, the only nameserver of corp.example, does not reply", make: func(e *examined) {
			e.other.Handle(fakedns.Silence)
			e.agent("--upstream", named, "--upstream", "corp.example="+other)
			e.asks(10, dnsAddr, func(i int) string { return fmt.Sprintf("w%d.corp.example.", i) })
		}},
		{name: "the nameserver forwards to the agent", says: "PROBLEM  127.0.0.9, the only nameserver, forwards to this agent", make: func(e *examined) {
			e.named.Close()
			e.program("dnsmasq", "--no-daemon", "--conf-file=/dev/null", "--no-resolv", "--listen-address=127.0.0.9", "--bind-interfaces", "--server=127.0.0.1#15053", "--cache-size=0")
			e.replace("resolv.conf", "nameserver 127.0.0.9\n")
			asked(e)
		}},
		{name: "too many queries wait", says: "PROBLEM  queries are refused because too many wait for nameservers", make: func(e *examined) {
			e.named.Handle(anyName(namedIP), fakedns.Delay(900*time.Millisecond))
			e.agent()
			conn, padded := e.socket53(dnsAddr), new(dns.Msg)
			padded.SetEdns0(1232, false)
			padded.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_PADDING{Padding: make([]byte, 40_000)}}
			e.repeats(500, conn, func(i int) *dns.Msg { // 18 MB in 900 ms, of which 8 MiB may wait
				return padded.SetQuestion(numbered(i), dns.TypeA)
			})
		}},
		{name: "names fail", says: "WARNING  queries fail: 10.0.0.53: SERVFAIL", make: func(e *examined) {
			e.named.Handle(fakedns.Rcode(dns.RcodeServerFailure), fakedns.Sometimes(0.5, 1, instead(namedIP)))
			asked(e)
		}},
		{name: "the nameserver does not answer over TCP", says: "WARNING  10.0.0.53, the only nameserver, does not reply over TCP", make: func(e *examined) {
			e.named.Handle(fakedns.Truncate(anyName(namedIP)), fakedns.OnTCP(fakedns.Drop))
			asked(e)
			e.mend = func() { e.named.Handle(fakedns.Truncate(anyName(namedIP))) }
		}},
		{name: "a firewall drops the agent's own queries", says: "PROBLEM  10.0.0.53, the only nameserver, cannot be queried: a firewall of this host drops the queries of the agent", make: func(e *examined) {
			e.drops("OUTPUT", "-p", "udp", "--dport", "53", "-m", "owner", "--uid-owner", "1337")
			asked(e)
		}},
	}
}

// instead is an effect that replaces a reply by an answer with an address.
func instead(address string) fakedns.Effect {
	answer := anyName(address)
	return func(r fakedns.Request, _ []fakedns.Packet) []fakedns.Packet {
		b, err := answer(r.Msg, r.Network).Pack()
		if err != nil {
			return nil
		}
		return []fakedns.Packet{{Bytes: b}}
	}
}

func brokenCapture() []hostCase {
	return []hostCase{
		{name: "the rules are removed again and again", says: "WARNING  another program removes or changes the capture rules again and again", make: func(e *examined) {
			e.capture()
			e.again(2*time.Second, "iptables-nft", "-w", "-t", "nat", "-F", "OUTPUT")
		}},
		{name: "a firewall drops the agent's own queries, with capture", says: "PROBLEM  a firewall of this host drops the queries that the agent forwards to 10.0.0.53", make: func(e *examined) {
			e.drops("OUTPUT", "-p", "udp", "--dport", "53", "-m", "owner", "--uid-owner", "1337")
			e.capture()
			e.asks(10, dnsAddr, numbered)
		}},
		{name: "a firewall drops the redirected queries", says: "PROBLEM  queries of programs to 10.0.0.53 do not reach the agent, although it answers", make: func(e *examined) {
			e.capture()
			e.Pipe("table inet site {\nchain out {\ntype filter hook output priority 0\noif != lo meta l4proto { tcp, udp } th dport 15053 drop\n}\n}\n", "nft", "-f", "-")
			e.mend = func() { e.Exec("nft", "delete", "table", "inet", "site") }
		}},
		{name: "a firewall drops redirected queries over TCP", says: "PROBLEM  queries of programs to 10.0.0.53 do not reach the agent, although it answers", make: func(e *examined) {
			e.capture()
			e.Pipe("table inet site {\nchain out {\ntype filter hook output priority 0\nct status dnat meta l4proto tcp th dport 15053 drop\n}\n}\n", "nft", "-f", "-")
		}},
		{name: "a firewall drops all output", says: "PROBLEM  DNS listeners of the agent do not answer", make: func(e *examined) {
			e.capture()
			e.Exec("iptables-nft", "-P", "OUTPUT", "DROP")
		}},
		{name: "a firewall drops all, no capture", says: "PROBLEM  DNS listeners of the agent do not answer", make: func(e *examined) {
			e.agent()
			e.Exec("iptables-nft", "-P", "OUTPUT", "DROP")
		}},
		{name: "another program redirects queries first", says: "PROBLEM  another server answers the queries of programs to 10.0.0.53:53 over udp", make: func(e *examined) {
			e.capture()
			e.Pipe("table ip site {\nchain out {\ntype nat hook output priority -150\nudp dport 53 dnat to "+other+"\n}\n}\n", "nft", "-f", "-")
			e.mend = func() { e.Exec("nft", "delete", "table", "ip", "site") }
		}},
		{name: "the rules cannot be installed", says: "PROBLEM  the rules for IPv4 cannot be installed; retrying", make: func(e *examined) {
			e.mend = e.breakTool("iptables-nft-restore")
			e.launch("--capture")
		}},
		{name: "some programs do not reach the agent", says: "PROBLEM  queries of programs to 10.0.0.53:53 over udp have no answer", make: func(e *examined) {
			e.capture()
			e.Exec("iptables-nft", "-t", "mangle", "-A", "OUTPUT", "-p", "udp", "--dport", "53", "-m", "owner", "--uid-owner", "65534", "-j", "DROP")
		}},
	}
}

// unit makes systemctl say what nametap.service is.
func (e *examined) unit(properties ...string) {
	e.tb.Helper()
	file := e.write("systemctl", "#!/bin/sh\ncat <<END\n"+strings.Join(properties, "\n")+"\nEND\n")
	if err := os.Chmod(file, 0o755); err != nil {
		e.tb.Fatal(err)
	}
	e.environment = append(e.environment, "PATH="+e.dir+":"+os.Getenv("PATH"))
}

// olderAgent makes commands see the agent as one of an older version.
func (e *examined) olderAgent() {
	e.tb.Helper()
	real, place := e.socket(), filepath.Join(e.dir, "older")
	if err := os.Mkdir(place, 0o755); err != nil {
		e.tb.Fatal(err)
	}
	listener, err := net.Listen("unix", filepath.Join(place, filepath.Base(real)))
	if err != nil {
		e.tb.Fatal(err)
	}
	server := &http.Server{Handler: &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) { r.Out.URL.Scheme, r.Out.URL.Host = "http", "agent" },
		Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", real)
		}},
		ModifyResponse: func(r *http.Response) error {
			text, err := io.ReadAll(r.Body)
			text = regexp.MustCompile(`"version": "nametap [^"]*"`).ReplaceAll(text, []byte(`"version": "nametap v0.0.9"`))
			r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(text)), int64(len(text))
			r.Header.Del("Content-Length")
			return err
		},
	}}
	go server.Serve(listener) //nolint:errcheck // it ends with the test
	e.tb.Cleanup(func() { server.Close() })
	e.environment = append(e.environment, "RUNTIME_DIRECTORY="+place)
}

// agentCommand is the command of an agent as root.
func (e *examined) agentCommand(flags ...string) *exec.Cmd {
	e.sameUser = true
	return e.command(slices.Concat([]string{"agent", "--xds-addr", e.xds.Addr(), "--xds-plaintext", "--status-addr", statusAddr,
		"--resolv-conf", e.resolvConf, "--drain", "10ms", "--state-dir", ""}, e.flags, flags)...)
}

// agentSeeing starts an agent as root that sees the files of the host.
func (e *examined) agentSeeing(flags ...string) {
	e.tb.Helper()
	e.launchCommand(e.seeing(e.agentCommand(flags...)))
	e.ready()
}

// ready waits until the agent is ready.
func (e *examined) ready() {
	e.tb.Helper()
	wait.Until(e.tb, "the agent is ready", func() bool { return strings.HasPrefix(e.get("/healthz/ready"), "HTTP/1.0 200") })
}

// program starts another program on the host, and waits for nothing.
func (e *examined) program(name string, args ...string) {
	e.tb.Helper()
	cmd := exec.Command(name, args...)
	if err := e.Start(cmd); err != nil {
		e.tb.Fatal(err)
	}
	e.tb.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
}

// listens waits until a program listens at an address over TCP.
func (e *examined) listens(address string) {
	e.tb.Helper()
	wait.Until(e.tb, "a program listens at "+address, func() bool { return strings.Contains(e.Exec("ss", "-lnt"), " "+address+" ") })
}

// folder makes a directory with a file, and returns its path.
func (e *examined) folder(name, file, text string) string {
	e.tb.Helper()
	dir := filepath.Join(e.dir, name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		e.tb.Fatal(err)
	}
	e.write(filepath.Join(name, file), text)
	return dir
}

// drops makes a firewall drop packets.
func (e *examined) drops(chain string, match ...string) {
	e.tb.Helper()
	change := func(how string) {
		e.Exec("iptables-nft", slices.Concat([]string{"-w", how, chain}, match, []string{"-j", "DROP"})...)
	}
	change("-A")
	e.mend = func() { change("-D") }
}

// opens starts a nameserver again.
func (e *examined) opens(server *fakedns.Server) {
	e.tb.Helper()
	var err error
	e.net.Run(func() { err = server.Restart() })
	if err != nil {
		e.tb.Fatal(err)
	}
}

// pushes pushes another table, which the agent saves.
func (e *examined) pushes() {
	e.xds.Push(&api.NameTable{Table: map[string]*api.NameTable_NameInfo{
		"cart.shop.svc.cluster.local": {Ips: []string{"10.1.0.2"}, Registry: "Kubernetes", Shortname: "cart", Namespace: "shop"},
	}})
}

// full returns a directory of the agent's user on a file system with little space.
func (e *examined) full() string {
	e.tb.Helper()
	dir := e.agentDir("state")
	if err := syscall.Mount("none", dir, "tmpfs", 0, "size=64k,uid=1337,gid=1337,mode=700"); err != nil {
		e.tb.Skipf("LEFT OUT: a full file system: %v", err)
	}
	e.tb.Cleanup(func() { _ = syscall.Unmount(dir, syscall.MNT_DETACH) })
	return dir
}

// accepts accepts connections and says nothing on them.
func (e *examined) accepts(addr string) {
	e.tb.Helper()
	var listener net.Listener
	var err error
	e.Run(func() { listener, err = net.ListenTCP("tcp", net.TCPAddrFromAddrPort(netip.MustParseAddrPort(addr))) })
	if err != nil {
		e.tb.Fatal(err)
	}
	e.tb.Cleanup(func() { listener.Close() })
}

// saved waits for a snapshot.
func (e *examined) saved(state string) {
	e.tb.Helper()
	wait.Until(e.tb, "there is a snapshot", func() bool {
		_, err := os.Stat(filepath.Join(state, "nametable.snapshot"))
		return err == nil
	})
}

// again runs a command again and again until the test ends.
func (e *examined) again(every time.Duration, name string, args ...string) {
	e.tb.Helper()
	ended, stopped := make(chan struct{}), make(chan struct{})
	e.tb.Cleanup(func() { close(ended); <-stopped })
	go func() {
		defer close(stopped)
		tick := time.NewTicker(every)
		defer tick.Stop()
		for {
			select {
			case <-ended:
				return
			case <-tick.C:
			}
			cmd := exec.Command(name, args...)
			e.Run(func() { _ = cmd.Start() })
			_ = cmd.Wait()
		}
	}()
}
