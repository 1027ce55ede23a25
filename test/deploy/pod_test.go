package deploy

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	corev1 "k8s.io/api/core/v1"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/fakexds"
	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/process"
	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
)

const (
	nameserver = "10.0.0.53:53" // in the pod's resolv.conf
	own        = "web.default.svc.cluster.local."
	foreign    = "www.example.org."
)

// A kubelet runs containers in a network namespace.
type kubelet struct {
	*netns.NS
	t    *testing.T
	pod  corev1.Pod
	conf string // the pod's resolv.conf
	xds  *fakexds.Server
}

// newKubelet makes a pod's namespace with a nameserver and a control plane.
func newKubelet(t *testing.T, pod corev1.Pod) *kubelet {
	t.Helper()
	k := &kubelet{NS: netns.New(t), t: t, pod: pod, conf: filepath.Join(t.TempDir(), "resolv.conf")}
	netns.Need(t, "ip", "iptables", "setpriv", "unshare")
	at := netip.MustParseAddrPort(nameserver)
	if err := os.WriteFile(k.conf, []byte("nameserver "+at.Addr().String()+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	k.Exec("ip", "address", "add", at.Addr().String()+"/32", "dev", "lo")
	k.Run(func() {
		fakedns.Start(t, fakedns.Answer(foreign+" 1 IN A 192.0.2.80"), fakedns.On(at))
		k.xds = fakexds.Start(t, fakexds.Options{})
	})
	k.xds.Push(&api.NameTable{Table: map[string]*api.NameTable_NameInfo{
		strings.TrimSuffix(own, "."): {Ips: []string{"10.1.0.1"}, Registry: "Kubernetes", Shortname: "web", Namespace: "default"},
	}})
	return k
}

// container returns the command of a container with the confinement of its manifest: user,
// capabilities and a read-only root, with only its volumes writable. The control plane is
// the test's, without TLS.
func (k *kubelet) container(c corev1.Container) *exec.Cmd {
	k.t.Helper()
	script := []string{"set -e", "mount -t tmpfs run /run", "mount -t tmpfs lib /var/lib", "mount --bind " + k.conf + " /etc/resolv.conf"}
	for _, m := range c.VolumeMounts {
		script = append(script, "mkdir -p "+m.MountPath, "mount -t tmpfs -o mode=1777 volume "+m.MountPath)
	}
	for _, mount := range []string{"/run", "/var/lib", "/"} {
		script = append(script, "mount -o remount,bind,ro "+mount)
	}
	security := c.SecurityContext
	capabilities := []string{"-all"}
	for _, capability := range security.Capabilities.Add {
		capabilities = append(capabilities, "+"+strings.ToLower(string(capability)))
	}
	script = append(script, fmt.Sprintf(
		"exec setpriv --reuid %d --regid %d --clear-groups --inh-caps -all --bounding-set %s --no-new-privs -- %s/nametap %s",
		*security.RunAsUser, *security.RunAsGroup, strings.Join(capabilities, ","), binaries.Dir(k.t), strings.Join(c.Args, " ")))
	settings := append(environ(k.t, k.pod, c), "NAMETAP_XDS_ADDR="+k.xds.Addr(), "NAMETAP_XDS_PLAINTEXT=true")
	return command(k.t, settings, "unshare", "--mount", "sh", "-c", strings.Join(script, "\n"))
}

// crash kills the agent that the supervisor with this process ID runs.
func (k *kubelet) crash(supervisor int) {
	k.t.Helper()
	var children []int
	wait.Until(k.t, "the agent runs", func() bool { children = process.Children(supervisor); return len(children) == 1 })
	if err := syscall.Kill(children[0], syscall.SIGKILL); err != nil {
		k.t.Fatal(err)
	}
}

// sidecar starts a container and returns its process and a function that ends it.
// Like kubelet without a startup probe, it does not wait.
func (k *kubelet) sidecar(c corev1.Container) (pid int, end func()) {
	k.t.Helper()
	log := testlog.New(k.t)
	cmd := k.container(c)
	cmd.Stdout, cmd.Stderr = log, log
	if err := k.Start(cmd); err != nil {
		k.t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	k.t.Cleanup(func() { _ = cmd.Process.Kill() })
	return cmd.Process.Pid, func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		if err := <-ended; err != nil {
			k.t.Errorf("%s ended: %v", c.Name, err)
		}
	}
}

// dial connects from within the namespace.
func (k *kubelet) dial(ctx context.Context, network, address string) (conn net.Conn, err error) {
	k.Run(func() { conn, err = new(net.Dialer).DialContext(ctx, network, address) })
	return conn, err
}

// ask queries the pod's nameserver over a new socket, like an application.
func (k *kubelet) ask(network, name string) (answer string, err error) {
	conn, err := k.dial(k.t.Context(), network, nameserver)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	client := dns.Client{Net: network, Timeout: 5 * time.Minute}
	reply, _, err := client.ExchangeWithConn(new(dns.Msg).SetQuestion(name, dns.TypeA), &dns.Conn{Conn: conn})
	if err != nil || len(reply.Answer) != 1 {
		return "", fmt.Errorf("%v, %w", reply, err)
	}
	return reply.Answer[0].(*dns.A).A.String(), nil
}

// asking queries a forwarded name repeatedly, until the returned function is called. That
// function returns the number of queries and the failures.
func (k *kubelet) asking() (end func() (asked int, failures []error)) {
	stop, stopped := make(chan struct{}), make(chan struct{})
	asked, failures := 0, []error(nil)
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			case <-time.After(2 * time.Millisecond):
			}
			asked++
			if _, err := k.ask("udp", foreign); err != nil {
				failures = append(failures, err)
			}
		}
	}()
	return func() (int, []error) {
		close(stop)
		<-stopped
		return asked, failures
	}
}

// start runs the init containers in their order with their rights, each as soon as the previous
// one runs or has ended. It returns the agent's process and a function that ends it.
func (k *kubelet) start() (agent int, end func()) {
	k.t.Helper()
	for _, c := range k.pod.Spec.InitContainers {
		if c.RestartPolicy != nil {
			agent, end = k.sidecar(c)
			continue
		}
		cmd := k.container(c)
		var log strings.Builder
		cmd.Stdout, cmd.Stderr = &log, &log
		err := k.Start(cmd)
		if err == nil {
			err = cmd.Wait()
		}
		if err != nil || !strings.Contains(log.String(), "in place") {
			k.t.Fatalf("%s: %v\n%s", c.Name, err, log.String())
		}
	}
	return agent, end
}

// TestPodRuns runs the containers of the manifest for istiod. They capture the pod's DNS, the app's first
// query is answered from the table, and no query fails meanwhile, nor when the agent dies.
func TestPodRuns(t *testing.T) { // I0, K15
	t.Parallel()
	k := newKubelet(t, load[corev1.Pod](t, "istiod", "Pod"))
	stopAsking := k.asking()
	agent, end := k.start()
	for name, want := range map[string]string{own: "10.1.0.1", foreign: "192.0.2.80"} {
		for _, network := range []string{"udp", "tcp"} {
			if got, err := k.ask(network, name); got != want {
				t.Errorf("%s over %s: %q, %v; want %s", name, network, got, err, want)
			}
		}
	}
	if asked, failures := stopAsking(); asked < 10 || len(failures) > 0 {
		t.Errorf("%d of %d queries failed while the pod started, the first: %v", len(failures), asked, failures[:min(1, len(failures))])
	}
	for range 3 {
		k.crash(agent)
		if got, err := k.ask("udp", own); got != "10.1.0.1" {
			t.Errorf("after the agent was killed: %q, %v", got, err)
		}
	}
	end()
}
