package main

import (
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/internal/condition"
	"github.com/nametap/nametap/nds"
)

// A message of a control plane neither commands the terminal nor adds a line to the status.
func TestStatusOfHostileTexts(t *testing.T) { // R15
	const hostile = "\x1b[2Jno\nready\tno"
	var text strings.Builder
	printAgentStatus(&text, agent.Status{
		Ready: true, XDS: nds.Status{LastError: hostile, CertificateError: hostile},
		Conditions: []condition.Condition{{Problems: []condition.Problem{{What: hostile, Evidence: hostile}}}},
		Upstreams:  []agent.Upstream{{LastError: hostile}},
	})
	if got := text.String(); strings.Contains(got, "\x1b") || strings.Count(got, "\nready") > 0 {
		t.Errorf("the status is\n%q", got)
	}
}

// A problem that has not lasted long is only suspected.
func TestSuspectedProblem(t *testing.T) { // R15
	var text strings.Builder
	since := time.Now()
	report := condition.Report{Suspected: []condition.Problem{{What: "192.0.2.1 does not reply", Since: since}}}
	new(doctorCommand).print(&text, agent.Status{}, report)
	if want := "\nsuspected since " + timeOfDay(since) + ", a problem after 15s: 192.0.2.1 does not reply\n"; !strings.Contains(text.String(), want) {
		t.Errorf("want %q in\n%s", want, &text)
	}
}
