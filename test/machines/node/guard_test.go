package node

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/lab"
)

// outsideIP is an address beside the pods that no name leads to.
const outsideIP = "198.51.100.81"

// policy allows one name, which leads to strangersIP, as all names do. It has no direct, where ICMP errors of the kernel could
// quote a name that was asked.
const policy = `
apiVersion: v1
kind: ConfigMap
metadata: {name: sandbox, namespace: %s}
data:
  policy.yaml: |
    mode: enforce
    allow: [{names: [allowed.example.org]}]
`

// Two loops, with pauses of some milliseconds: of connections to addresses and of queries, also to other
// nameservers, for a name that is not allowed. Each prints what it reached, and then the number of its attempts.
const (
	knocks = `$| = 1; while (1) {
  for $to (@ARGV) { $n++; $s = IO::Socket::INET->new(PeerAddr => $to, Timeout => 1) and print "reached $to\n" }
  $n % 50 or print "attempts $n\n";
  select undef, undef, undef, 0.005 }`
	asks = `$| = 1; $query = pack "n6", 7, 256, 1, 0, 0, 0; $query .= pack "C/a*", $_ for qw(forbidden example net), ""; $query .= pack "n2", 1, 1;
while (1) { for $to (@ARGV) { $n++;
  $s = IO::Socket::INET->new(PeerAddr => $to, Proto => "udp") or next; $s->send($query) or next;
  $r = ""; vec($r, fileno $s, 1) = 1; select $r, undef, undef, 0.2 or next;
  $s->recv($reply, 512); @h = unpack "n6", $reply; $h[3] and print "answered by $to\n" }
  $n % 50 or print "attempts $n\n";
  select undef, undef, undef, 0.005 }`
	connectsTo = `$s = IO::Socket::INET->new(PeerAddr => $ARGV[0], Timeout => 5) or die "connect: $!\n"; $got = <$s>; defined $got or die "read: $!\n"; print $got`
)

// An outside is what is beside the pods of a node: servers on port 443 of two addresses, which greet.
type outside struct {
	reached, forbidden atomic.Int64 // connections to strangersIP and to outsideIP
	lookups            atomic.Int64 // packets with the allowed name
	leaked             atomic.Int64 // packets with the other name, or to outsideIP
}

// outside starts the servers, and counts packets on the bridge of the pods.
func (c *cluster) outside(t *testing.T) *outside {
	t.Helper()
	o := new(outside)
	for address, count := range map[string]*atomic.Int64{strangersIP: &o.reached, outsideIP: &o.forbidden} {
		c.Exec("ip", "address", "add", address+"/32", "dev", "lo")
		c.Serve(address+":443", func(conn *net.TCPConn) {
			count.Add(1)
			fmt.Fprintf(conn, "hello from %s\n", address)
		})
	}
	var packets int
	var err error
	c.Run(func() {
		const all = unix.ETH_P_ALL<<8&0xff00 | unix.ETH_P_ALL>>8
		var bridge *net.Interface
		if bridge, err = net.InterfaceByName("cni0"); err != nil {
			return
		}
		if packets, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, all); err == nil {
			err = errors.Join(unix.Bind(packets, &unix.SockaddrLinklayer{Protocol: all, Ifindex: bridge.Index}),
				unix.SetsockoptTimeval(packets, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 100_000}))
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	end, ended := make(chan struct{}), make(chan struct{})
	t.Cleanup(func() { close(end); <-ended; unix.Close(packets) })
	go func() {
		defer close(ended)
		packet, address := make([]byte, 65536), net.ParseIP(outsideIP).To4()
		for {
			select {
			case <-end:
				return
			default:
			}
			n, _, _ := unix.Recvfrom(packets, packet, 0) // fails after a time without a packet
			switch p := packet[:max(0, n)]; {
			case bytes.Contains(p, []byte("\x09forbidden")), n >= 34 && bytes.Equal(p[12:14], []byte{8, 0}) && bytes.Equal(p[30:34], address): // IPv4, to it
				if o.leaked.Add(1) < 10 {
					t.Logf("a packet that must not leave, at %s: %q", time.Now().Format(time.StampMilli), p)
				}
			case bytes.Contains(p, []byte("\x07allowed")):
				o.lookups.Add(1)
			}
		}
	}()
	return o
}

// testGuard injects a pod with a guard, and checks that a name that it allows is reached, and nothing else, while the agent
// is killed, stopped, restarted and upgraded: no attempt of two loops succeeds, and no packet leaves the pod.
func (c *cluster) testGuard(t *testing.T) {
	s := c.space(t, "")
	o := s.outside(t)
	s.Apply(fmt.Sprintf(policy, s.name))
	spec := app()
	loop := func(name, script string, to ...string) corev1.Container {
		return confine(corev1.Container{Name: name, Image: "debian:12-slim", Command: append([]string{"perl", "-MIO::Socket::INET", "-e", script}, to...)})
	}
	spec.Spec.Containers = append(spec.Spec.Containers,
		loop("knocks", knocks, strangersIP+":443", outsideIP+":443", outsideIP+":853", clusterIP+":853", "169.254.169.254:80"),
		loop("asks", asks, clusterIP+":53", nodeIP+":"+dnsPort, outsideIP+":53"))
	p := injection{s.cluster, "rules", discoveryAddr, "guard: sandbox\n"}.pod(s, spec)
	p.ready()
	connect := func(to string) (string, error) {
		return p.exec("app", "perl", "-MIO::Socket::INET", "-e", connectsTo, to)
	}
	allowed := func() {
		t.Helper()
		lab.Until(t, "the allowed name is reached", func() bool {
			got, err := connect("allowed.example.org:443")
			return err == nil && got == "hello from "+strangersIP+"\n"
		})
	}
	allowed()
	for _, to := range []string{"allowed.example.org:80", "forbidden.example.net:443", strangersIP + ":443", outsideIP + ":443"} {
		if got, err := connect(to); err == nil {
			t.Errorf("%s answers %q", to, got)
		}
	}
	attempts := func(container string) (n int) {
		t.Helper()
		log, err := p.log(container, false)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(log, "reached") || strings.Contains(log, "answered") {
			t.Fatalf("%s:\n%s", container, log)
		}
		if at := strings.LastIndex(log, "attempts "); at >= 0 {
			_, _ = fmt.Sscanf(log[at:], "attempts %d", &n) // the line may not be whole
		}
		return n
	}
	for _, step := range []struct {
		name string
		do   func()
	}{
		{"killed", func() {
			supervisor := p.pid("nametap")
			for range 5 {
				agent := p.agent()
				p.kill(agent, syscall.SIGKILL)
				p.replaced(supervisor, agent)
			}
		}},
		{"stopped", func() { // until kubelet restarts the container
			before := status(p.now(), "nametap").RestartCount
			p.kill(p.agent(), syscall.SIGSTOP)
			p.await("kubelet restarts the container", func(now *corev1.Pod) bool { return status(now, "nametap").RestartCount > before })
		}},
		{"restarted", func() {
			before := status(p.now(), "nametap").RestartCount
			p.kill(p.pid("nametap"), syscall.SIGKILL)
			p.await("kubelet restarts the container", func(now *corev1.Pod) bool { return status(now, "nametap").RestartCount > before })
		}},
		{"upgraded", func() {
			image, old := p.now().Spec.InitContainers[0].Image, status(p.now(), "nametap").ContainerID
			if output, err := c.ctr("", "images", "tag", "docker.io/library/"+image, "docker.io/library/nametap:next"); err != nil {
				t.Fatal(err, output)
			}
			now := p.now()
			now.Spec.InitContainers[0].Image = "nametap:next"
			if err := s.Do(http.MethodPut, s.path("pods", p.name), now, nil); err != nil {
				t.Fatal(err)
			}
			p.await("kubelet replaces the container", func(now *corev1.Pod) bool {
				next := status(now, "nametap")
				return next.ContainerID != old && next.State.Running != nil
			})
		}},
	} {
		knocked, asked := attempts("knocks"), attempts("asks")
		step.do()
		wait.Until(t, "the loops go on", func() bool { return attempts("knocks") > knocked && attempts("asks") > asked })
		allowed()
		t.Logf("%s: %d connections and %d queries were refused meanwhile", step.name, attempts("knocks")-knocked, attempts("asks")-asked)
	}
	if leaked, forbidden := o.leaked.Load(), o.forbidden.Load(); leaked > 0 || forbidden > 0 || o.lookups.Load() == 0 || o.reached.Load() < 5 {
		t.Errorf("%d packets left the pod, %d connections to %s, %d lookups and %d connections of the allowed name", leaked, forbidden, outsideIP, o.lookups.Load(), o.reached.Load())
	}
}
