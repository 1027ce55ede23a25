package iptables_test

import (
	"errors"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nametap/nametap/iptables"
)

// K1
func TestCapture(t *testing.T) {
	matrix(t, func(l *lab) {
		t := l.t
		l.agent()
		l.want("U")
		c := l.capture()
		l.want("AU")
		remove(t, c)
		l.want("U")
	})
}

// K1: the agent is known by its gid alone, or by its uid alone.
func TestAgentsUsers(t *testing.T) {
	matrix(t, func(l *lab) {
		t := l.t
		l.agentAs("4000 1337", "same", "-", 15053)
		l.agentAs("1337 4000", "same", "-", 15054)
		c := l.capture()
		l.want("AU")
		cfg := l.config(func(c *iptables.Config) { c.Port = 15054 })
		if err := c.Reconfigure(t.Context(), cfg); err != nil {
			t.Fatal(err)
		}
		l.want("AU")
	})
}

// K6
func TestExclusions(t *testing.T) {
	matrix(t, func(l *lab) {
		t := l.t
		l.agent()
		other := startPeer(t, 0)
		other.do("user 2000 3000")
		fromOther := func(way string) {
			t.Helper()
			if got := other.do("ask udp - %s 2o", l.server('2')); got != "2o"+way {
				t.Errorf("uid 2000, gid 3000: %q, want way %q", got, way)
			}
		}
		prefix := netip.MustParsePrefix(l.pick("10.77.0.3/32", "fd77::3/128"))
		c := newCapture(t, l.config(), l.log)
		with := func(change func(*iptables.Config)) {
			t.Helper()
			if err := c.Reconfigure(t.Context(), l.config(change)); err != nil {
				t.Fatal(err)
			}
		}
		apply(t, c)
		fromOther("AU")
		with(func(c *iptables.Config) { c.ExcludeUIDs = []uint32{1999, 2000} })
		fromOther("U")
		l.want("AU")
		with(func(c *iptables.Config) { c.ExcludeGIDs = []uint32{3000} })
		fromOther("U")
		l.want("AU")
		with(func(c *iptables.Config) { c.ExcludeCIDRs = []netip.Prefix{prefix} })
		l.wantFrom(l.server('3'), "U")
		l.want("AU")
		with(func(c *iptables.Config) { c.ExcludeInterfaces = []string{"eth+"} })
		l.want("U")
		with(func(c *iptables.Config) { c.ExcludeInterfaces = []string{"eth1"} })
		l.want("AU")
		with(func(c *iptables.Config) { c.ExcludeSourcePorts = []uint16{5300} })
		if reply, err := ask("udp", l.eth0(5300), l.server('2'), "2p"); err != nil || reply != "2pU" {
			t.Errorf("from port 5300: %q, %v", reply, err)
		}
		l.want("AU")
		with(func(c *iptables.Config) { c.Servers = []netip.Addr{prefix.Addr()} })
		l.want("U")
		l.wantFrom(l.server('3'), "AU")
		with(func(c *iptables.Config) { c.Servers = []netip.Addr{prefix.Addr(), netip.MustParseAddr("192.0.2.1")} })
		l.wantFrom(l.server('3'), "AU")
		l.want("U")
	})
}

// K6: what containers behind a virtual interface ask.
func TestVirtualInterface(t *testing.T) {
	matrix(t, func(l *lab) {
		t := l.t
		agent := l.agent()
		container := startPeer(t, syscall.CLONE_NEWNET)
		sh(t, `ip link add virt0 type veth peer name eth0c
ip link set eth0c netns %d
ip addr add 10.78.0.1/24 dev virt0
ip addr add fd78::1/64 dev virt0 nodad
ip link set virt0 up
echo 1 >/proc/sys/net/ipv4/ip_forward
echo 1 >/proc/sys/net/ipv6/conf/all/forwarding`, container.cmd.Process.Pid)
		container.do("sh ip link set lo up; ip addr add 10.78.0.2/24 dev eth0c; ip addr add fd78::2/64 dev eth0c nodad; " +
			"ip link set eth0c up; ip route add default via 10.78.0.1; ip -6 route add default via fd78::1")
		agent.do("serve A same - %s", l.pick("10.78.0.1", "[fd78::1]")+":15053")
		ask := func(way string) {
			t.Helper()
			for _, network := range []string{"udp", "tcp"} {
				if got := container.try("ask %s - %s 2c", network, l.server('2')); got != "ok 2c"+way {
					t.Errorf("%s from the container: %q, want way %q", network, got, way)
				}
			}
		}
		ask("U")
		c := l.capture()
		ask("U")
		if err := c.Reconfigure(t.Context(), l.config(func(c *iptables.Config) { c.VirtualInterfaces = []string{"virt0"} })); err != nil {
			t.Fatal(err)
		}
		ask("AU")
		l.want("AU")
		remove(t, c)
		ask("U")
	})
}

// K7: a stub resolver on loopback that asks nameservers itself.
func TestStubResolver(t *testing.T) {
	for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
		t.Run(string(backend), func(t *testing.T) {
			if !isolated(t) {
				return
			}
			l := newLab(t, backend, iptables.IPv4)
			sh(t, "echo 0 >/proc/sys/net/ipv4/ip_unprivileged_port_start")
			stub := startPeer(t, 0)
			stub.do("user 101 101")
			stub.do("serve S 10.77.0.2:53 - 127.0.0.53:53")
			l.agentAs("1337 1337", "127.0.0.53:53", "-", 15053)
			l.wantFrom("127.0.0.53:53", "SU")

			c := l.capture(func(c *iptables.Config) { c.ExcludeUIDs = []uint32{101} })
			l.wantFrom("127.0.0.53:53", "ASU")
			l.want("ASU") // to another server, captured all the same
			stubOnly := l.config(func(c *iptables.Config) { c.Servers = []netip.Addr{netip.MustParseAddr("127.0.0.53")} })
			if err := c.Reconfigure(t.Context(), stubOnly); err != nil {
				t.Fatal(err)
			}
			l.wantFrom("127.0.0.53:53", "ASU")
			l.want("U")
		})
	}
}

// K7: Docker's resolver, whose rules lead 127.0.0.11:53 to another port.
func TestDockerResolver(t *testing.T) {
	backends(t, func(l *lab) {
		t, backend := l.t, l.backend
		l = newLab(t, backend, iptables.IPv4)
		resolver := startPeer(t, 0)
		resolver.do("serve S 10.77.0.2:53 - 127.0.0.11:41053")
		resolver.do("user 1338 1338") // after that: its own queries would be captured as root's, too
		sh(t, `iptables-%[1]s-restore --noflush <<-.
		*nat
		:DOCKER_OUTPUT - [0:0]
		-A OUTPUT -d 127.0.0.11/32 -j DOCKER_OUTPUT
		-A DOCKER_OUTPUT -d 127.0.0.11/32 -p udp -m udp --dport 53 -j DNAT --to-destination 127.0.0.11:41053
		-A DOCKER_OUTPUT -d 127.0.0.11/32 -p tcp -m tcp --dport 53 -j DNAT --to-destination 127.0.0.11:41053
		COMMIT
		.`, backend)
		l.agentAs("1337 1337", "127.0.0.11:53", "-", 15053)
		l.wantFrom("127.0.0.11:53", "SU")
		l.capture(func(c *iptables.Config) { c.Backend = iptables.Auto; c.ExcludeUIDs = []uint32{1338} })
		l.wantFrom("127.0.0.11:53", "ASU")
	})
}

// K8
func TestSocketsInUse(t *testing.T) {
	for _, zone := range []uint16{53, 0} {
		t.Run(map[uint16]string{53: "zone", 0: "no zone"}[zone], func(t *testing.T) {
			matrix(t, func(l *lab) {
				t := l.t
				l.agent()
				conn := l.socket()
				l.wantOn(conn, "U")
				c := l.capture(func(c *iptables.Config) { c.Zone = zone })
				l.wantOn(conn, "AU")
				remove(t, c)
				l.wantOn(conn, "U")
				apply(t, c)
				l.wantOn(conn, "AU")
			})
		})
	}
}

// K12
func TestDeadAgent(t *testing.T) {
	matrix(t, func(l *lab) {
		t := l.t
		agent := l.agent()
		l.capture()
		conn := l.socket()
		l.wantOn(conn, "AU")
		agent.stop()
		for _, network := range []string{"udp", "tcp"} {
			start := time.Now()
			_, err := ask(network, "-", l.server('2'), "2d")
			if took := time.Since(start); !errors.Is(err, syscall.ECONNREFUSED) || took > time.Second {
				t.Errorf("%s: %v after %v, want refused at once", network, err, took)
			} else {
				t.Logf("%s: refused after %v", network, took)
			}
		}
		if _, err := askOn(conn, "2d"); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("socket in use: %v, want refused", err)
		}
	})
}

// K2
func TestApplyTwice(t *testing.T) {
	backends(t, func(l *lab) {
		t, backend := l.t, l.backend
		cfg := iptables.DefaultConfig()
		cfg.Backend = backend
		log := new(logBuffer)
		c := newCapture(t, cfg, log)
		before := saves(t)
		plan, err := c.Plan(t.Context())
		if err != nil || len(plan) != 2 || !strings.Contains(plan[0].Text, "REDIRECT --to-ports 15053") {
			t.Fatalf("plan %v, %v", plan, err)
		}
		if saves(t) != before {
			t.Fatal("to plan changed something")
		}
		apply(t, c)
		once := saves(t)
		if plan, err := c.Plan(t.Context()); err != nil || len(plan) != 0 {
			t.Errorf("plan %v, %v, want none", plan, err)
		}
		apply(t, c)
		apply(t, newCapture(t, cfg, log))
		if twice := saves(t); twice != once {
			t.Errorf("after the second time:\n%s\nafter the first:\n%s", twice, once)
		}
		if n := log.count("DNS is captured"); n != 1 {
			t.Errorf("said %d times that DNS is captured, want once:\n%s", n, log)
		}
		status, err := c.Status(t.Context())
		if err != nil || status.Backend != backend {
			t.Fatalf("status %+v, %v", status, err)
		}
		for _, f := range status.Families {
			if f.State != iptables.InPlace || !f.Zone || f.OtherBackend {
				t.Errorf("status %+v", f)
			}
		}
	})
}
