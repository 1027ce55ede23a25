package node

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// Programs in the Perl that every Debian has.
const (
	greets   = `$s = IO::Socket::INET->new(LocalPort => 3306, Listen => 9) or die $!; while ($c = $s->accept) { print $c "hello from $ARGV[0]\n"; close $c }`
	connects = `$s = IO::Socket::INET->new(PeerAddr => $ARGV[0]) or die "connect: $!\n"; $got = <$s>; defined $got or die "read: $!\n"; print $got`
)

// testEgress injects a pod whose agent carries connections to automatic VIPs: two hosts on one port lead to a pod
// each, which speaks first, and other ports are refused. E1, E4, E6.
func (c *cluster) testEgress(t *testing.T) {
	t.Parallel()
	s := c.space(t, nil)
	for _, name := range []string{"one", "two"} {
		spec := app()
		spec.Name = name
		spec.Spec.Containers[0].Command = []string{"perl", "-MIO::Socket::INET", "-e", greets, name}
		server := s.create(spec)
		server.ready()
		now, err := server.get()
		if err != nil {
			t.Fatal(err)
		}
		c.apply(t, fmt.Sprintf(`
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: %[1]s, namespace: %[2]s}
spec:
  hosts: [%[1]s.external.example.com]
  ports: [{number: 3306, name: tcp, protocol: TCP}]
  resolution: STATIC
  endpoints: [{address: %[3]s}]
`, name, s.name, now.Status.PodIP))
	}
	config := filepath.Join(t.TempDir(), "inject.yaml")
	if err := os.WriteFile(config, []byte("settings: {egress: true}\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	var injected corev1.Pod
	injection{c, "rules", discoveryAddr, []string{"--config", config}}.inject(t, s.name, app(), &injected)
	shop := s.create(&injected)
	shop.ready()
	for _, name := range []string{"one", "two"} {
		wait.Until(t, "the pod has a VIP of "+name, func() bool {
			answer, err := shop.exec("app", "getent", "ahostsv4", name+".external.example.com")
			return err == nil && strings.HasPrefix(answer, "240.240.")
		})
		if got := shop.mustExec("app", "perl", "-MIO::Socket::INET", "-e", connects, name+".external.example.com:3306"); got != "hello from "+name+"\n" {
			t.Errorf("%s: %q", name, got)
		}
	}
	if got, err := shop.exec("app", "perl", "-MIO::Socket::INET", "-e", connects, "one.external.example.com:80"); err == nil {
		t.Errorf("port 80, which the host does not have: %q", got)
	}
	status := shop.mustExec("nametap", "nametap", "status")
	t.Logf("nametap status:\n%s", status)
	if !strings.Contains(status, "one.external.example.com") || !strings.Contains(status, "port") {
		t.Errorf("nametap status shows neither the host nor the refused port:\n%s", status)
	}
	shop.notRestarted()
}
