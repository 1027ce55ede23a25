package test

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/internal/testkit/process"
	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// waits asks once for the mesh's name, and waits for the answer.
func (h *host) waits(network string) {
	h.tb.Helper()
	var conn net.Conn
	var err error
	h.Run(func() { conn, err = net.Dial(network, dnsAddr) })
	if err != nil {
		h.tb.Fatalf("a query over %s is refused: %v", network, err)
	}
	defer conn.Close()
	client := dns.Client{Timeout: patience}
	reply, _, err := client.ExchangeWithConn(new(dns.Msg).SetQuestion(mesh+".", dns.TypeA), &dns.Conn{Conn: conn})
	if err != nil || len(reply.Answer) != 1 || reply.Answer[0].(*dns.A).A.String() != meshIP {
		h.tb.Errorf("over %s: %v, %v", network, reply, err)
	}
}

// TestSupervisedDeath checks that queries wait for the next agent when one dies, also
// repeatedly, and that the next one has the table.
func TestSupervisedDeath(t *testing.T) { // K15, C7
	t.Parallel()
	h := newHost(t)
	h.capabilities = nil
	a := h.supervised()
	h.xds.Stop()
	const deaths = 4
	for i := range deaths {
		pid := a.killChild()
		wait.Until(t, "the agent is dead", func() bool { return child(a.Process.Pid) != pid })
		h.waits([]string{"udp", "tcp"}[i%2])
	}
	wait.Until(t, "the restarts are counted", func() bool { return h.metric("nametap_restarts_total") >= deaths })
	if n := a.log.Count("the agent has ended: restarting it"); n != deaths && !stoodStill(t) {
		t.Errorf("the log reports the restart in %d lines", n)
	}
	if len(h.named.Queries()) != 0 {
		t.Errorf("the nameserver received %v", h.named.Queries())
	}
	a.end(terminate)
	if code := a.ProcessState.ExitCode(); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

// TestSupervisedAddress checks that an agent that is restarted keeps its address, where queries wait.
func TestSupervisedAddress(t *testing.T) { // K15
	t.Parallel()
	h := newHost(t)
	a := h.launchCommand(h.command("agent", "--supervise", "--config", h.write("config", "dns-addr: "+dnsAddr+"\n"),
		"--xds-addr", h.xds.Addr(), "--xds-plaintext", "--status-addr", statusAddr, "--resolv-conf", h.resolvConf, "--drain", "10ms"))
	wait.Until(t, "the agent is ready", func() bool { return strings.HasPrefix(h.get("/healthz/ready"), "HTTP/1.0 200") })
	h.replace("config", "dns-addr: 127.0.0.1:15153\n")
	a.killChild()
	h.waits("udp")
}

// TestSupervisedReaderHangs checks that an agent is replaced when one of its UDP listeners stops
// answering, and that this happens once if the next agent does not answer there either.
func TestSupervisedReaderHangs(t *testing.T) { // K15
	t.Parallel()
	v := newVM(t, "nft")
	v.capabilities = nil
	a := v.start("--supervise", "--dns-addr", "localhost:15053")
	first := child(a.Process.Pid)
	answers := func() bool { return v.digSoon("@::1", "-p", "15053", mesh) == meshIP }
	wait.Until(t, "the listener answers", answers)
	// The agent has seen an answer once it has probed: then the packets are counted.
	count := []string{"-w", "-t", "mangle", "-A", "OUTPUT", "-p", "udp", "-d", "::1", "--dport", "15053"}
	v.Exec("ip6tables-nft", count...)
	probes := func() int {
		fields := strings.Fields(strings.Split(v.Exec("ip6tables-nft", "-t", "mangle", "-nvxL", "OUTPUT"), "\n")[2])
		n, _ := strconv.Atoi(fields[0])
		return n
	}
	wait.Until(t, "the listener is probed", func() bool { return probes() > 0 })
	wait.Until(t, "the probe is answered", answers)
	v.Exec("ip6tables-nft", "-w", "-A", "INPUT", "-p", "udp", "--dport", "15053", "-j", "DROP")
	wait.Until(t, "the agent is replaced", func() bool { pid := child(a.Process.Pid); return pid != 0 && pid != first })
	wait.Until(t, "the log says why", func() bool { return a.log.Count("the agent hangs: ") > 0 })
	if a.log.Count("the agent hangs: ") != 1 {
		t.Errorf("%s", a.log)
	}
	before := probes()
	wait.Until(t, "the next agent is probed as often as a hung one", func() bool { return probes() >= before+5 })
	if a.log.Count("the agent hangs: ") != 1 {
		t.Errorf("the next agent was killed:\n%s", a.log)
	}
}

// TestSupervisedEnd checks that signals reach the agent, that the supervisor ends with it,
// and that the rules are removed.
func TestSupervisedEnd(t *testing.T) { // K15, R8
	t.Parallel()
	for name, end := range map[string]func(v *vm, a *agent){
		"signal":  func(_ *vm, a *agent) { a.end(terminate) },
		"hang-up": func(_ *vm, a *agent) { a.end(syscall.SIGHUP) },
		"request": func(v *vm, a *agent) {
			v.privateRaw("POST /quitquitquit HTTP/1.0\r\n\r\n")
			a.end(syscall.Signal(0))
		},
		// The kernel signals the agent when its supervisor dies.
		"kill": func(v *vm, a *agent) {
			pid := child(a.Process.Pid)
			a.end(syscall.SIGKILL)
			wait.Until(v.tb, "the agent has ended, too", func() bool { return syscall.Kill(pid, 0) != nil })
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			v := newVM(t, "nft")
			v.terminal = name == "hang-up"
			a := v.capture("--supervise")
			v.asked(named, meshIP)
			a.killChild()
			v.asked(named, meshIP) // by the next agent; the rules still redirect to its port
			wait.Until(t, "the agent is ready again", func() bool { return strings.HasPrefix(v.get("/healthz/ready"), "HTTP/1.0 200") })
			wait.Until(t, "the agent checks the rules", func() bool { return v.metric("nametap_capture_on") == 1 })
			end(v, a)
			if code := a.ProcessState.ExitCode(); code != 0 && name != "kill" {
				t.Errorf("exit code %d", code)
			}
			if v.captured() {
				t.Errorf("rules are left:\n%s", v.Rules())
			}
		})
	}
}

// TestSupervisedNeverStarts checks that the host has working DNS while the agent keeps
// dying, and that the agent is restarted again and again.
func TestSupervisedNeverStarts(t *testing.T) { // K9, K15
	t.Parallel()
	v := newVM(t, "nft")
	a := v.capture("--supervise")
	v.asked(named, meshIP)
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() { // kills every agent as soon as it has started
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
				pid := child(a.Process.Pid)
				command, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
				if strings.Contains(string(command), "\x00agent\x00") { // not another process with this number
					_ = syscall.Kill(pid, syscall.SIGKILL)
				}
			}
		}
	}()
	// The lease of the rules ends. On a busy machine an agent may live long enough to renew it.
	wait.Until(t, "the nameserver answers", func() bool { return v.digSoon("@"+named, mesh) == namedIP })
	starts := func() int { return a.log.Count("restarting it") }
	before := starts()
	wait.Until(t, "the agent is restarted", func() bool { return starts() >= before+3 })
	close(stop)
	<-stopped
	wait.Until(t, "the agent captures again", func() bool { return v.digSoon("@"+named, mesh) == meshIP })
}

// TestSupervisedContainer checks that the supervisor, as process 1 of a container, reaps
// orphaned processes, and that wrong settings end it instead of causing a restart.
func TestSupervisedContainer(t *testing.T) { // K15, R7
	t.Parallel()
	h := newHost(t)
	args := []string{
		"agent", "--supervise", "--xds-addr", h.xds.Addr(), "--xds-plaintext", "--dns-addr", dnsAddr, "--status-addr", statusAddr,
		"--resolv-conf", h.resolvConf, "--state-dir", "", "--drain", "0s",
	}
	container := exec.Command("unshare", append([]string{"--pid", "--fork", "--kill-child", "--mount-proc", binary(t)}, args...)...)
	container.Env = append(os.Environ(), "RUNTIME_DIRECTORY="+h.runDir(), "POD_NAME=web-0", "POD_NAMESPACE=shop", "INSTANCE_IP=10.1.2.3")
	log := testlog.New(t)
	container.Stderr = log
	if err := h.Start(container); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = container.Process.Kill() }) // if the test has failed
	ended := make(chan error, 1)
	go func() { ended <- container.Wait() }()
	wait.Until(t, "the agent is ready", func() bool { return strings.HasPrefix(h.get("/healthz/ready"), "HTTP/1.0 200") })
	first := child(container.Process.Pid)
	for range 5 { // children of a shell that ends before them
		h.Exec("nsenter", "--target", strconv.Itoa(first), "--pid", "sh", "-c", "sleep 0.01 & exit 0")
	}
	wait.Until(t, "the agent is the only child", func() bool { return len(process.Children(first)) == 1 })
	agent := process.Children(first)[0]
	if err := syscall.Kill(agent, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	h.waits("udp") // the next agent answers
	if err := syscall.Kill(first, terminate); err != nil {
		t.Fatal(err)
	}
	if err := wait.For(t, "the container ends", ended); err != nil {
		t.Errorf("the supervisor ends with %v", err)
	}
	for _, wrong := range [][]string{{"--ttl", "soon"}, {"--dns-addr", "here"}, {"--before-sync", "no"}} {
		r := h.nametap(append(slices.Clone(args), wrong...)...)
		if r.code != 2 && r.code != 1 || strings.Contains(r.stderr, "started again") {
			t.Errorf("%v: %+v", wrong, r)
		}
	}
}
