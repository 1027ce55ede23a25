package test

import (
	"strings"
	"testing"
)

// E16: the status, nametap query and metrics say which VIP leads to which host and address, how many
// bytes, and what was refused.
func TestEgressStatus(t *testing.T) {
	t.Parallel()
	e := newEgressVM(t, "nft")
	e.net.Serve(serverA+":7", greeter("one"))
	e.web(serverB+":80", "two", false)
	e.resolve(exactA, serverA)
	e.resolve("b.apps.example.org", serverB)
	e.capture()
	if got := e.greeting(vipA, "7"); got != "220 one" {
		t.Fatal(got)
	}
	e.Exec("curl", "--silent", "--show-error", "--max-time", "20", "--connect-to", "::"+vipWild+":", "http://b.apps.example.org/")
	e.greeting(unusedVIP, "7")
	status := e.root("status", "--status-addr", statusAddr).stdout
	for _, want := range []string{
		"egress ", " of ",
		exactA + ": " + vipA + ":7 to " + serverA + ":7, ", " of 1, 0 bytes sent, 8 received",
		"b.apps.example.org of " + wildcard + ": " + vipWild + ":80 to " + serverB + ":80, ",
		"refused, no_host: 1, last ", "no host of the table has the address " + unusedVIP,
	} {
		if !strings.Contains(status, want) {
			t.Errorf("want %q in the status:\n%s", want, status)
		}
	}
	for name, want := range map[string]float64{
		"nametap_egress_connections_total":                 2,
		`nametap_egress_bytes_total{direction="received"}`: 0,
		`nametap_egress_refusals_total{reason="no_host"}`:  1,
		`nametap_egress_refusals_total{reason="no_name"}`:  0,
	} {
		if got := e.metric(name); got < want || want == 0 && strings.Contains(name, "no_name") && got != 0 {
			t.Errorf("%s is %v, want %v", name, got, want)
		}
	}
}
