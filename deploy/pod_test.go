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
)

// proxyConfig is the annotation of Istio's settings.
const proxyConfig = "proxy.istio.io/config"

const (
	nameserver = "10.0.0.53:53" // in the pod's resolv.conf
	own        = "web.default.svc.cluster.local."
	foreign    = "www.example.org."
)

// environ returns a container's environment like kubelet.
func environ(t *testing.T, pod corev1.Pod, c corev1.Container) []string {
	t.Helper()
	fields := map[string]string{
		"metadata.name": pod.Name, "metadata.namespace": "default",
		"status.podIP": "127.0.0.1", "status.hostIP": "192.0.2.1", "spec.serviceAccountName": "default",
	}
	for key, value := range pod.Annotations {
		fields["metadata.annotations['"+key+"']"] = value
	}
	all := []string{"KUBERNETES_SERVICE_HOST=10.96.0.1"}
	for _, variable := range c.Env {
		value := variable.Value
		if variable.ValueFrom != nil {
			var known bool
			if value, known = fields[variable.ValueFrom.FieldRef.FieldPath]; !known {
				t.Fatalf("%s: there is no field %q", variable.Name, variable.ValueFrom.FieldRef.FieldPath)
			}
		}
		all = append(all, variable.Name+"="+value)
	}
	return all
}

// TestPodSettings checks that the commands accept the settings.
func TestPodSettings(t *testing.T) {
	t.Parallel()
	for _, variant := range manifests {
		pod := load(t, variant).pod
		for _, c := range pod.Spec.InitContainers {
			output(t, command(t, nil, "nametap", append(c.Args, "--help")...))
			// Every command reads all settings; this one changes nothing.
			output(t, command(t, environ(t, pod, c), "nametap", "capture", "print", "--clean"))
		}
	}
}

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
	children := process.Children(supervisor)
	if len(children) != 1 {
		k.t.Fatalf("%d children, want the agent alone", len(children))
	}
	if err := syscall.Kill(children[0], syscall.SIGKILL); err != nil {
		k.t.Fatal(err)
	}
}

// sidecar starts a container and returns its process and a function that ends it and returns the
// time that this took. Like kubelet without a startup probe, it does not wait.
func (k *kubelet) sidecar(c corev1.Container) (pid int, end func() time.Duration) {
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
	return cmd.Process.Pid, func() time.Duration {
		begun := time.Now()
		_ = cmd.Process.Signal(syscall.SIGTERM)
		if err := <-ended; err != nil {
			k.t.Errorf("%s ended: %v", c.Name, err)
		}
		return time.Since(begun)
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
	client := dns.Client{Net: network, Timeout: 2 * time.Second}
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
// one runs or has ended. It returns the agent's process, a function that ends it and returns the
// time that this took, and the time until the app's container can start.
func (k *kubelet) start() (agent int, end func() time.Duration, took time.Duration) {
	k.t.Helper()
	began := time.Now()
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
	return agent, end, time.Since(began)
}

// TestPodRuns runs the containers of each manifest. They capture the pod's DNS, the app's first
// query is answered from the table, no query fails meanwhile, and the end has no drain.
func TestPodRuns(t *testing.T) { // I0
	t.Parallel()
	for _, variant := range manifests {
		t.Run(variant, func(t *testing.T) {
			k := newKubelet(t, load(t, variant).pod)
			stopAsking := k.asking()
			agent, end, took := k.start()
			for name, want := range map[string]string{own: "10.1.0.1", foreign: "192.0.2.80"} {
				for _, network := range []string{"udp", "tcp"} {
					if got, err := k.ask(network, name); got != want {
						t.Errorf("%s over %s: %q, %v; want %s", name, network, got, err, want)
					}
				}
			}
			t.Logf("the app can start after %v", took)
			if asked, failures := stopAsking(); asked < 10 || len(failures) > 0 {
				t.Errorf("%d of %d queries failed while the pod started, the first: %v", len(failures), asked, failures[:min(1, len(failures))])
			}
			for range 3 { // K15: no query is lost when the agent dies
				k.crash(agent)
				begun := time.Now()
				if got, err := k.ask("udp", own); got != "10.1.0.1" {
					t.Errorf("after the agent was killed: %q, %v", got, err)
				}
				t.Logf("the first query after the agent was killed took %v", time.Since(begun))
			}
			if took := end(); took > 4*time.Second {
				t.Errorf("the end took %v, as with a drain", took)
			}
		})
	}
}

// TestPodWithoutControlPlane checks that a pod starts without a control plane, after the time
// that its manifest gives to the first table, with an agent that forwards.
func TestPodWithoutControlPlane(t *testing.T) { // I0
	t.Parallel()
	k := newKubelet(t, load(t, "istiod").pod)
	k.xds.Stop()
	_, _, took := k.start()
	t.Logf("the app can start after %v", took)
	if took < 3*time.Second || took > 20*time.Second {
		t.Errorf("the app can start after %v, want 3 s and a little more", took)
	}
	if got, err := k.ask("udp", foreign); got != "192.0.2.80" {
		t.Errorf("%s: %q, %v", foreign, got, err)
	}
}
