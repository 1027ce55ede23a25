package inject_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/nametap/nametap/inject"
)

// refused fails the test unless a pod is refused with a reason.
func refused(t *testing.T, text string, cfg inject.Config, reason string) {
	t.Helper()
	result, err := inject.Pod(parse(t, text), shop, cfg)
	if err != nil || result.Outcome != inject.Refused || !strings.Contains(result.Reasons[0], reason) {
		t.Errorf("%s %q, %v; want refused, %q", result.Outcome, result.Reasons, err, reason)
	}
}

// TestRefused checks the pods in which nametap would not work.
func TestRefused(t *testing.T) { // I14
	t.Parallel()
	spec := func(fields string) string { return "metadata: {name: app}\nspec:\n" + fields }
	const app = "  containers: [{name: app, image: app}]\n"
	rules := inject.Config{}
	user := spec("  containers: [{name: app, image: app, securityContext: {runAsUser: 1337}}]\n")
	refused(t, user, rules, `container "app" runs as user 1337`)
	refused(t, spec("  securityContext: {runAsUser: 1337}\n"+app), rules, `container "app" runs as user 1337`)
	refused(t, spec("  containers: [{name: app, image: app, securityContext: {runAsGroup: 1337}}]\n"), rules, `container "app" runs as group 1337`)
	refused(t, spec(app+"  initContainers: [{name: migrate, image: app, securityContext: {runAsUser: 1337}}]\n"), rules, `container "migrate"`)
	refused(t, spec("  containers: [{name: app, image: app, ports: [{containerPort: 15053}]}]\n"), rules, `the port 15053`)
	refused(t, spec("  containers: [{name: dns, image: app, ports: [{containerPort: 53}]}]\n"), resolv, `the port 53`)
	refused(t, spec(app+"  volumes: [{name: nametap-state, emptyDir: {}}]\n"), rules, `volume "nametap-state"`)
	refused(t, spec(app+"  dnsPolicy: Default\n"), resolv, `dnsPolicy is Default`)
	refused(t, spec(app+"  dnsPolicy: None\n"), resolv, `dnsConfig has no nameservers`)
	injected(t, spec(app+"  dnsConfig: {options: [{name: 'a;b'}, {name: 'ndots:2'}], searches: ['a,b']}\n"), resolv)

	for _, nameserver := range []string{"127.0.0.1", "::1", "0.0.0.0", "224.0.0.251", "::ffff:192.0.2.1", "fe80::1%eth0", "dns.example", "192.0.2.1:53"} {
		refused(t, spec(app+"  dnsPolicy: None\n  dnsConfig: {nameservers: [192.0.2.1, '"+nameserver+"']}\n"), resolv, fmt.Sprintf("the nameserver %q, to which the agent cannot forward", nameserver))
	}
	refused(t, spec(app+"  dnsConfig: {searches: ["+strings.Join(domains(30, ""), ", ")+"]}\n"), resolv, "more than 32 domains")
	refused(t, spec(app+"  dnsConfig: {searches: ["+strings.Join(domains(20, strings.Repeat("a", 100)), ", ")+"]}\n"), resolv, "2048 characters")
	status := "metadata: {annotations: {nametap.dev/status: '{\"mode\":\"resolv\",\"initContainers\":{\"nametap\":\"\"},\"volumes\":{\"nametap-state\":\"\"}}'}}\nspec:\n"
	refused(t, status+app+"  initContainers: [{name: nametap-capture, image: own}]\n", rules, `container "nametap-capture" that was not injected`)
	refused(t, status+"  containers: [{name: nametap, image: own}]\n", rules, `container "nametap" that was not injected`)

	injected(t, spec(app+"  dnsConfig: {nameservers: [169.254.20.10, 'fe80::1', 'fd00::1'], searches: ["+strings.Join(domains(29, ""), ", ")+"]}\n"), resolv)
	egress := inject.Config{Settings: map[string]string{"egress": "true"}}
	refused(t, spec("  containers: [{name: app, image: app, ports: [{containerPort: 15054}]}]\n"), egress, `the port 15054`)
	egress.Settings["egress-addr"] = "localhost:16000"
	refused(t, spec("  containers: [{name: app, image: app, ports: [{containerPort: 16000}]}]\n"), egress, `the port 16000`)
	injected(t, spec("  containers: [{name: app, image: app, ports: [{containerPort: 15054}]}]\n"), egress)
	injected(t, spec("  containers: [{name: app, image: app, ports: [{containerPort: 15054}]}]\n"), rules)
	injected(t, user, resolv) // no rule depends on the user
	injected(t, spec("  securityContext: {runAsUser: 1337}\n  containers: [{name: app, image: app, securityContext: {runAsUser: 1000}}]\n"), rules)
	injected(t, spec("  containers: [{name: dns, image: app, ports: [{containerPort: 53}]}]\n"), rules)
}

// domains returns domains for a search list.
func domains(count int, prefix string) []string {
	var list []string
	for i := range count {
		list = append(list, fmt.Sprintf("%ss%d.example", prefix, i))
	}
	return list
}

// TestNamespaceName checks that a name which the annotation cannot keep is refused in mode resolv, whose search
// list has it.
func TestNamespaceName(t *testing.T) { // I2, I14
	t.Parallel()
	for _, name := range []string{"", "a;b", "a,b"} {
		ns := inject.Namespace{Name: name, Requested: true}
		result, err := inject.Pod(parse(t, plain), ns, resolv)
		if err != nil || result.Outcome != inject.Refused || !strings.Contains(result.Reasons[0], fmt.Sprintf("namespace %q", name)) {
			t.Errorf("%q: %s %q, %v", name, result.Outcome, result.Reasons, err)
		}
		if result, err := inject.Pod(parse(t, plain), ns, inject.Config{}); err != nil || result.Outcome != inject.Injected {
			t.Errorf("%q, mode rules: %s %q, %v", name, result.Outcome, result.Reasons, err)
		}
	}
}

// TestStatus checks that an annotation that another program wrote is refused.
func TestStatus(t *testing.T) { // I2
	t.Parallel()
	for _, value := range []string{
		"", "injected", "{}", `{"mode":"other"}`, `{"mode":"rules"} {}`, `{"mode":"rules","volumes":[]}`, `{"mode":"rules","volumes":{"data":""}}`,
		`{"mode":"rules","initContainers":{"nametap":"","prepare":""}}`, `{"mode":"resolv","sysctls":["kernel.x"]}`, `{"mode":"rules","more":"x"}`, `{"volumes":{}}`,
	} {
		refused(t, "metadata: {annotations: {nametap.dev/status: '"+value+"'}}\nspec: {containers: [{name: app, image: app}]}\n", inject.Config{}, "annotation nametap.dev/status")
	}
}

// TestNoPod checks the errors about trees that are no pods.
func TestNoPod(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"spec: []", "spec: {containers: x}", "spec: {containers: [x]}", "metadata: {labels: []}", "spec: {}", "{}"} {
		if result, err := inject.Pod(parse(t, text), shop, inject.Config{}); err == nil {
			t.Errorf("%s: %v", text, result)
		}
	}
}
