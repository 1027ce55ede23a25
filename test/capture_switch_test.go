package test

import (
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// broken is not a valid mesh config.
const broken = "defaultConfig: [\n"

// TestSwitch switches capture on and off by the mesh config while an agent runs and
// applications send queries.
func TestSwitch(t *testing.T) { // K2, K9, R7
	t.Parallel()
	vms(t, func(v *vm) {
		t := v.tb
		path := v.write("mesh", meshConfig(false))
		a := v.start("--capture", "--mesh-config", path)
		l := v.load()
		v.more(l, namedIP)
		for _, step := range []struct {
			write func(name, text string) string
			text  string
			want  bool
		}{
			{v.replace, meshConfig(true), true},
			{v.replace, meshConfig(false), false},
			{v.write, meshConfig(true), true}, // while replies to captured queries may still be in flight
			{v.write, broken, true},
			{v.write, meshConfig(false), false},
		} {
			step.write("mesh", step.text)
			if step.text == broken {
				wait.Until(t, "the log reports it", func() bool { return a.log.Count("the settings stay unchanged") > 0 })
			}
			wait.Until(t, "the switch is followed", func() bool { return v.captured() == step.want })
			v.more(l, map[bool]string{true: meshIP, false: namedIP}[step.want])
		}
		wait.Until(t, "the rules are removed", func() bool { return !strings.Contains(v.Rules(), "NAMETAP") })
		v.more(l, namedIP)
		v.noneLost(l, true)
		if n := a.log.Count("the settings stay unchanged"); n != 1 {
			t.Errorf("a broken file is logged %d times:\n%s", n, a.log)
		}
		unseen := a.log.Count("capture rules of an earlier agent may remain") // without more capabilities, this user cannot read legacy
		if n := a.log.Count("level=WARN") + a.log.Count("level=ERROR") - unseen; (n != 1 || unseen > 1) && !stoodStill(t) {
			t.Errorf("%d lines of the log are of warnings:\n%s", n, a.log)
		}
	})
}

// TestSwitchOff checks that apply installs nothing and succeeds if the switch is off. The
// environment overrides the pod's annotation, which overrides the mesh config.
func TestSwitchOff(t *testing.T) { // R7
	t.Parallel()
	v := newVM(t, "auto")
	v.start()
	before := v.Rules()
	mesh := v.write("mesh", meshConfig(false))
	off := func(because string) string {
		return "no rules installed: ISTIO_META_DNS_CAPTURE=false (" + because + ")\n"
	}
	annotation := func(on string) string {
		return `PROXY_CONFIG={"proxyMetadata":{"ISTIO_META_DNS_CAPTURE":"` + on + `"}}`
	}
	for _, test := range []struct {
		environment []string
		flags       []string
		want        string // of standard output; "" if it captures
	}{
		{environment: []string{"ISTIO_META_DNS_CAPTURE=false"}, want: off("environment variable ISTIO_META_DNS_CAPTURE")},
		{environment: []string{annotation("false")}, want: off("PROXY_CONFIG")},
		{flags: []string{"--mesh-config", mesh}, want: off("mesh config " + mesh)},
		{flags: []string{"--capture-enabled=false"}, want: off("--capture-enabled")},
		{environment: []string{annotation("false"), "ISTIO_META_DNS_CAPTURE=true"}},
		{environment: []string{annotation("true")}, flags: []string{"--mesh-config", mesh}},
		{environment: []string{annotation("true"), "ISTIO_META_DNS_CAPTURE=false"}, flags: []string{"--mesh-config", mesh},
			want: off("environment variable ISTIO_META_DNS_CAPTURE")},
		{environment: []string{"ISTIO_META_DNS_CAPTURE=false"}, flags: []string{"--capture-enabled"}},
		{},
	} {
		v.environment = test.environment
		r := v.root(v.args("apply", test.flags...)...)
		on := test.want == ""
		if r.code != 0 || r.stderr != "" && !on || !on && r.stdout != test.want || v.captured() != on {
			t.Errorf("%v %v: %+v", test.environment, test.flags, r)
		}
		// The status agrees, and fails if the rules do not match the switch.
		if r := v.root(v.args("status", test.flags...)...); r.code != 0 || !strings.Contains(r.stdout, "ISTIO_META_DNS_CAPTURE=") {
			t.Errorf("status: %v %v: %+v", test.environment, test.flags, r)
		}
		if on {
			v.root(v.args("remove")...)
		}
		if now := v.Rules(); now != before {
			t.Fatalf("rules before:\n%s\nand after:\n%s", before, now)
		}
	}
}
