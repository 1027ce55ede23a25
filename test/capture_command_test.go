package test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/iptables"
)

// TestCaptureCommands runs the subcommands of capture as the agent's user.
func TestCaptureCommands(t *testing.T) { // K3, K4, K11
	t.Parallel()
	vms(t, func(v *vm) {
		t := v.tb
		v.start()
		before := v.Rules()
		state := func(want iptables.State, code int) { // at last, on a busy machine
			t.Helper()
			wait.Until(t, "the rules are "+string(want), func() bool {
				var status struct {
					Backend  string
					Families []struct{ Family, State string }
				}
				r, text := v.parse(&status, "status"), v.nametap(v.args("status")...)
				return r.code == code && len(status.Families) == 2 && status.Families[0].State == string(want) && status.Backend == v.backend &&
					text.code == code && strings.Contains(text.stdout, "IPv4      "+string(want))
			})
		}
		var findings []iptables.Finding
		if r := v.parse(&findings, "check"); r.code != 0 || len(findings) < 6 || r.stderr != "" {
			t.Errorf("check: %+v", r)
		}
		state(iptables.Absent, 1)

		var steps []struct{ Program, Text string }
		if r := v.parse(&steps, "print"); r.code != 0 || len(steps) != 2 {
			t.Fatalf("print: %+v", r)
		}
		printed := v.nametap(v.args("print")...).stdout
		for _, step := range steps {
			if !strings.Contains(printed, "# "+step.Program+"\n"+step.Text) {
				t.Errorf("print writes\n%s\nand as JSON\n%+v", printed, step)
			}
			program := strings.Fields(strings.Replace(step.Program, "tables-", "tables-"+v.backend+"-", 1))
			v.Pipe(step.Text, program[0], program[1:]...)
		}
		state(iptables.InPlace, 0) // restoring the printed text equals apply
		if r := v.nametap(v.args("apply")...); r.code != 0 || strings.Contains(r.stderr, "DNS is captured") {
			t.Errorf("apply: %+v", r)
		}

		v.Exec("iptables-"+v.backend, "-w", "-t", "nat", "-F", "NAMETAP_OUTPUT")
		state(iptables.Drifted, 1)
		if r := v.nametap(v.args("apply")...); r.code != 0 {
			t.Errorf("apply: %+v", r)
		}
		state(iptables.InPlace, 0)
		if v.backend == "nft" { // this user cannot read legacy, so remove fails
			if r := v.nametap(v.args("remove")...); r.code != 1 || !strings.Contains(r.stderr, "rules of nametap may remain") {
				t.Errorf("remove: %+v", r)
			}
		}
		for range 2 { // a second remove succeeds as well
			if r := v.root(v.args("remove")...); r.code != 0 || r.stdout != "" {
				t.Errorf("remove: %+v", r)
			}
		}
		if after := v.Rules(); after != before {
			t.Errorf("before:\n%s\nafter:\n%s", before, after)
		}
	})
}

// parse runs a subcommand of capture and parses its JSON output.
func (v *vm) parse(into any, subcommand string) result {
	v.tb.Helper()
	r := v.nametap(v.args(subcommand, "--output", "json")...)
	if err := json.Unmarshal([]byte(r.stdout), into); err != nil {
		v.tb.Fatalf("%s: %v of %+v", subcommand, err, r)
	}
	return r
}

// TestCaptureNotPermitted checks that an error names the missing permission.
func TestCaptureNotPermitted(t *testing.T) { // K11
	t.Parallel()
	v := newVM(t, "auto")
	v.capabilities = nil
	for _, subcommand := range []string{"apply", "status", "remove", "check"} {
		r := v.nametap(v.args(subcommand)...)
		if r.code != 1 || !strings.Contains(r.stderr, "CAP_NET_ADMIN") {
			t.Errorf("%s: %+v", subcommand, r)
		}
		first, _, _ := strings.Cut(r.stderr, "\n")
		if subcommand == "apply" && (!strings.Contains(first, "CAP_NET_ADMIN is missing") ||
			!strings.Contains(first, "securityContext.capabilities.add") || strings.Contains(r.stderr, "legacy")) {
			t.Errorf("apply begins with %q", first)
		}
	}
	if r := v.nametap(v.args("apply", "--capture-wait", "1m")...); r.code != 1 || !strings.HasPrefix(r.stderr, "nametap capture apply: CAP_NET_ADMIN is missing") {
		t.Errorf("apply --capture-wait: %+v", r)
	}
	if r := v.nametap(v.args("print")...); r.code != 0 || !strings.Contains(r.stdout, "-j REDIRECT --to-ports 15053") {
		t.Errorf("print: %+v", r)
	}
	if r := v.nametap(v.args("apply", "--output", "yaml")...); r.code != 2 || strings.Contains(r.stderr, "CAP_NET_ADMIN") {
		t.Errorf("apply --output yaml: %+v", r)
	}
	a := v.launch("--capture")
	<-a.ended
	if a.ProcessState.ExitCode() != 1 || !strings.Contains(a.log.String(), "nametap agent: capturing DNS: ") || !strings.Contains(a.log.String(), "CAP_NET_ADMIN") {
		t.Errorf("agent: %v\n%s", a.ProcessState, a.log)
	}
	// The agent could not tell its own queries from an application's.
	r := v.root("agent", "--capture")
	if r.code != 2 || !strings.Contains(r.stderr, "--capture-agent-uid") {
		t.Errorf("agent as root: %+v", r)
	}
}

// TestCaptureIncomplete checks that apply exits 1 if a supported family is not captured, and that the metric says so.
func TestCaptureIncomplete(t *testing.T) { // K13
	t.Parallel()
	v := newVM(t, "nft")
	v.breakTool("ip6tables-nft-restore")
	if r := v.root(v.args("apply")...); r.code != 1 || !strings.Contains(r.stderr, "capture is incomplete") || !strings.Contains(r.stdout, "IPv4      in place") {
		t.Errorf("apply: %+v", r)
	}
	v.capture()
	for _, level := range []string{`family="IPv4",level="complete"`, `family="IPv6",level="failed"`} {
		if metrics := v.get("/metrics"); !strings.Contains(metrics, "nametap_capture_level{"+level+"} 1") {
			t.Errorf("the level is not %s:\n%s", level, metrics)
		}
	}
}

// TestStatusOfCapture checks what `nametap status` reports about the rules of an agent.
func TestStatusOfCapture(t *testing.T) { // K10, R7
	t.Parallel()
	v := newVM(t, "nft")
	v.capture()
	want := []string{
		"capture        on: ISTIO_META_DNS_CAPTURE=true (default), 0 repairs\n",
		"backend        nft: ", "IPv4           in place, ends with the agent\n", "IPv6           in place, ends with the agent\n",
	}
	r := v.nametap("status", "--status-addr", statusAddr)
	for _, line := range want {
		if r.code != 0 || !strings.Contains(r.stdout, line) {
			t.Errorf("%+v does not have %q", r, line)
		}
	}
	if r := v.nametap("status", "--status-addr", statusAddr, "--output", "json"); r.code != 0 || !strings.Contains(r.stdout, `"state": "in place"`) {
		t.Errorf("%+v", r)
	}
}
