package test

import (
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// TestDoctor checks that `nametap doctor` sends a query as another user does, through the rules of the agent, and says
// if the agent does not answer it although its own probes are answered.
func TestDoctor(t *testing.T) { // R15
	t.Parallel()
	v := newVM(t, "nft")
	v.start("--capture")
	doctor := func() result {
		return v.root("doctor", "--all", "--status-addr", statusAddr, "--resolv-conf", v.resolvConf)
	}
	says := func(code int, line string) {
		t.Helper()
		var got result
		defer func() {
			if t.Failed() {
				t.Logf("%+v", got)
			}
		}()
		wait.Until(t, "doctor says "+line, func() bool {
			got = doctor()
			return got.code == code && strings.Contains(got.stdout, "\n"+line)
		})
	}
	says(0, "ok       the agent answers the queries of programs\nok       queries of programs are answered\n")
	rule := []string{"OUTPUT", "-p", "udp", "--dport", "53", "-m", "owner", "--uid-owner", "65534", "-j", "DROP"}
	change := func(how string) {
		v.Exec("iptables-nft", append([]string{"-w", "-t", "mangle", how}, rule...)...)
	}
	change("-A")
	says(1, "PROBLEM  queries of programs to "+named+":53 over udp have no answer\n")
	change("-D")
	says(0, "ok       queries of programs are answered\n")
	v.Exec("iptables-nft", "-w", "-A", "INPUT", "-p", "udp", "--dport", "15053", "-j", "DROP")
	says(1, "PROBLEM  DNS listeners of the agent do not answer  since ")
}

// TestDoctorInPod checks that `nametap doctor` says in a container without capabilities whether queries are redirected.
func TestDoctorInPod(t *testing.T) { // R15, K11
	t.Parallel()
	v := newVM(t, "nft")
	v.capabilities = nil
	v.start()
	v.environment = append(v.environment, "KUBERNETES_SERVICE_HOST=10.96.0.1")
	says := func(code int, line string) {
		t.Helper()
		wait.Until(t, "doctor says "+line, func() bool {
			got := v.nametap("doctor", "--all", "--status-addr", statusAddr, "--resolv-conf", v.resolvConf)
			return got.code == code && strings.Contains(got.stdout, "\n"+line)
		})
	}
	says(1, "PROBLEM  queries of this pod over IPv4 are not redirected to the agent\n")
	if r := v.root(v.args("apply")...); r.code != 0 {
		t.Errorf("%+v", r)
	}
	says(0, "ok       the agent answers the queries of programs\n")
}
