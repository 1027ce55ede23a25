package test

import (
	"fmt"
	"os/exec"
	"strconv"
	"syscall"
	"testing"

	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/wait"
)

const (
	stubAddr = "127.0.0.53"
	stubID   = 1053

	capNetBindService = 10
)

// stub starts a forwarder on loopback as a separate user. It forwards to the nameserver on
// the other machine.
func (v *vm) stub() {
	v.tb.Helper()
	netns.Need(v.tb, "dnsmasq")
	cmd := exec.Command("dnsmasq", "--keep-in-foreground", "--conf-file=/dev/null", "--pid-file=", "--no-hosts", "--no-resolv",
		"--bind-interfaces", "--listen-address="+stubAddr, "--server="+named, "--cache-size=0")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Credential:  &syscall.Credential{Uid: stubID, Gid: stubID},
		AmbientCaps: []uintptr{capNetBindService},
		Pdeathsig:   syscall.SIGKILL,
	}
	if err := v.Start(cmd); err != nil {
		v.tb.Fatal(err)
	}
	v.tb.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // it was killed
	})
	wait.Until(v.tb, "the stub answers", func() bool { return v.refused(stubAddr) == nil })
	v.named.Reset()
}

// TestStub checks that queries of applications to a stub are captured. The stub's own
// queries reach their nameserver: excluded by user, excluded by address, or forwarded by
// the agent to their original destination. If none of these applies, the queries loop, and
// the agent ends the loop at once.
func TestStub(t *testing.T) { // K7, F14, F15
	t.Parallel()
	uid := strconv.Itoa(stubID)
	for name, test := range map[string]struct {
		flags   []string
		besides string // nameservers of resolv.conf
		answers string // to forwarded names
		passed  float64
		circle  bool
	}{
		"defaults":      {answers: namedIP, passed: 2},
		"exclude-uid":   {flags: []string{"--capture-exclude-uid", uid}, answers: namedIP},
		"resolv-conf":   {flags: []string{"--capture-servers", "resolv-conf"}, answers: namedIP},
		"both":          {flags: []string{"--capture-servers", "resolv-conf", "--capture-exclude-uid", uid}, answers: namedIP},
		"circle":        {answers: "SERVFAIL", circle: true},
		"half a circle": {besides: "nameserver " + other + "\n", answers: otherIP, circle: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			v := newVM(t, "auto")
			v.resolvConf = v.write("resolv.conf", "nameserver "+stubAddr+"\n"+test.besides)
			v.stub()
			var a *agent
			if test.circle { // without CAP_NET_ADMIN the agent does not learn the original destination
				v.capabilities = nil
				a = v.start()
				v.root(v.args("apply")...)
			} else {
				a = v.capture(test.flags...)
			}
			for n, over := range []string{"+notcp", "+tcp"} {
				v.asked(stubAddr, meshIP)
				name := fmt.Sprintf("www%d.example.org", n)
				v.digs(test.answers, over, "@"+stubAddr, name)
			}
			if n := a.log.Count("its queries come back to this agent"); (n == 1) != test.circle {
				t.Errorf("the loop is logged %d times", n)
			}
			// On a busy machine, the stub repeats queries that are late, and the agent sends a loop probe. A loop makes hundreds.
			n, most := v.metric("nametap_dns_original_destination_total"), 10*test.passed
			if n < test.passed || n > most {
				t.Errorf("%v queries of the stub came to the agent, want %v to %v", n, test.passed, most)
			}
			if n := v.metric(`nametap_upstream_requests_total{upstream="127.0.0.53"}`); n > 50+most*2 {
				t.Errorf("the stub received %v queries", n)
			}
		})
	}
}
