package test

import (
	"encoding/base64"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

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
			e.becomes("")
		}
	})
}

func brokenHosts() []hostCase {
	return slices.Concat(brokenCapture(), brokenServers(), brokenLocally(), brokenControl()) // what takes longest first
}

func brokenLocally() []hostCase {
	return []hostCase{
		{name: "another program has the port", says: "PROBLEM  no agent answers on this host, and dnsmasq (process N) has its port", make: func(e *examined) {
			e.program("dnsmasq", "--no-daemon", "--conf-file=/dev/null", "--no-resolv", "--port=15053", "--listen-address=127.0.0.1,::1", "--bind-interfaces")
			e.listens("[::1]:15053")
			e.launch()
		}},
		{name: "the unit's settings do not parse", says: "PROBLEM  a setting of nametap.service (/etc/default/nametap) cannot be used", make: func(e *examined) {
			e.files["/etc/default"] = e.folder("default", "nametap", "NAMETAP_UPSTREAM=nonsense\n")
		}},
		{name: "the unit's settings were changed", says: "WARNING  settings have changed that take effect after a restart: --ttl (NAMETAP_TTL=10s)", make: func(e *examined) {
			e.unit("NAMETAP_TTL=10s\n")
			e.mend = func() { e.write("default/nametap", "NAMETAP_TTL=30s\n") } // the default
		}},
		{name: "there is no directory for the private socket", says: "WARNING  an agent answers at " + statusAddr + ", but commands cannot ask it", make: func(e *examined) {
			e.environment = append(e.environment, "RUNTIME_DIRECTORY=")
			e.start()
		}},
		{name: "settings were changed and do not parse", says: "WARNING  the settings files have changed, and cannot be used", make: func(e *examined) {
			config := e.write("config.yaml", "cache-size: 1MiB\n")
			e.start("--config", config)
			e.replace("config.yaml", "cache-size: many\n")
			e.mend = func() { e.replace("config.yaml", "cache-size: 2MiB\n") }
		}},
		{name: "connections leave from an address of another host", says: "PROBLEM  an address of --egress-source is on no interface of this host", raises: "egress_source", make: func(e *examined) {
			e.start("--egress", "--egress-addr", "localhost:15056", "--egress-source", "10.99.0.1")
		}},
		{name: "the listener is firewalled", says: "PROBLEM  DNS listeners of the agent do not answer", raises: "listener_silent", make: func(e *examined) {
			e.start()
			e.drops("INPUT", "-p", "udp", "--dport", "15053")
		}},
		{name: "resolv.conf is missing", says: "PROBLEM  DIR/resolv.conf cannot be read", make: func(e *examined) {
			e.start("--upstream", named)
			e.Exec("rm", e.resolvConf)
			e.mend = func() { e.replace("resolv.conf", "nameserver "+named+"\n") }
		}},
		{name: "nsswitch.conf has no dns", says: "PROBLEM  /etc/nsswitch.conf has no dns for hosts", make: func(e *examined) {
			e.files["/etc/nsswitch.conf"] = "hosts: files myhostname\n"
			e.start()
		}},
		{name: "nsswitch.conf asks mDNS", says: "WARNING  /etc/nsswitch.conf asks mDNS for names below .local, and then no other service", make: func(e *examined) {
			e.files["/etc/nsswitch.conf"] = "hosts: files mdns4_minimal [NOTFOUND=return] dns\n"
			e.files["/run"] = e.folder("run/avahi-daemon", "socket", "") + "/.."
			e.start()
		}},
		{name: "no descriptor is free", says: "PROBLEM  the agent has no free descriptors", make: func(e *examined) {
			e.sameUser = true
			a := e.start()
			a.exhaust()
			e.mend = func() { a.limitFiles(1024) }
		}},
	}
}

func brokenControl() []hostCase {
	authority := func(e *examined) *fakexds.Authority {
		return fakexds.NewAuthority(e.tb, "istiod.istio-system.svc", "spiffe://cluster.local/ns/shop/sa/default")
	}
	secure := func(e *examined, root *fakexds.Authority, flags ...string) {
		e.launch(append([]string{"--xds-plaintext=false", "--xds-root-ca", e.write("root.pem", root.Root())}, flags...)...)
	}
	return []hostCase{
		{name: "the token has expired", says: "PROBLEM  the token for the control plane has expired", make: func(e *examined) {
			a := authority(e)
			e.control(fakexds.Options{Authority: a, Token: "another"})
			secure(e, a, "--workload-cert", "off", "--xds-token-file", e.write("token", token(-2*time.Hour, -time.Hour)))
		}},
		{name: "the control plane has another authority", says: "PROBLEM  the agent does not accept the certificate of the control plane 127.0.0.1:15012", make: func(e *examined) {
			e.control(fakexds.Options{Authority: authority(e)})
			secure(e, authority(e), "--xds-token-file", "")
		}},
		{name: "the control plane's name does not resolve", says: "PROBLEM  the name of the control plane istiod.istio-system.svc:15012 does not resolve", make: func(e *examined) {
			e.named.Handle(fakedns.Answer())
			e.files["/etc/resolv.conf"] = e.resolvConf
			e.agentSeeing("--xds-addr", "istiod.istio-system.svc:15012")
		}},
		{name: "the control plane refuses connections", says: "PROBLEM  the control plane 127.0.0.1:15012 refuses connections", make: func(e *examined) {
			e.launch("--xds-addr", controlAddr)
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
		e.start()
		e.asks(10, dnsAddr, numbered)
	}
	return []hostCase{
		{name: "the only nameserver is silent", says: "PROBLEM  10.0.0.53, the only nameserver, does not reply", make: func(e *examined) {
			e.named.Handle(fakedns.Silence)
			asked(e)
			e.mend = func() { e.named.Handle(anyName(namedIP)) }
		}},
		{name: "the first nameserver answers REFUSED", says: "WARNING  10.0.0.53, the first nameserver, answers no query", make: func(e *examined) {
			two(e)
			e.named.Handle(fakedns.Rcode(dns.RcodeRefused))
			asked(e)
		}},
		{name: "the nameserver forwards to the agent", says: "PROBLEM  127.0.0.9, the only nameserver, forwards to this agent", make: func(e *examined) {
			e.named.Close()
			e.program("dnsmasq", "--no-daemon", "--conf-file=/dev/null", "--no-resolv", "--listen-address=127.0.0.9", "--bind-interfaces", "--server=127.0.0.1#15053", "--cache-size=0")
			e.replace("resolv.conf", "nameserver 127.0.0.9\n")
			asked(e)
		}},
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

// unit starts the agent as systemd's nametap.service, and then writes a file with its environment.
func (e *examined) unit(file string) {
	e.tb.Helper()
	a := e.start()
	e.files["/etc/default"] = e.folder("default", "nametap", file)
	e.folder("bin", "README", "")
	e.script("bin/systemctl", fmt.Sprintf("#!/bin/sh\necho 'LoadState=loaded\nMainPID=%d\n"+
		"Environment=POD_NAME=web-0 POD_NAMESPACE=shop INSTANCE_IP=10.1.2.3\nEnvironmentFiles=/etc/default/nametap (ignore_errors=yes)'\n", a.Process.Pid))
	e.environment = append(e.environment, "PATH="+filepath.Join(e.dir, "bin")+":"+os.Getenv("PATH"))
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
