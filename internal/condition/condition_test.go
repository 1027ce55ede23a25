package condition_test

import (
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nametap/nametap/internal/condition"
)

// down returns conditions with a problem of a nameserver if there is one, and with a consequence.
func down(found bool) []condition.Condition {
	all := []condition.Condition{
		{Code: "consequence", Title: "queries do not fail", Causes: []condition.Code{condition.NameserverDown}},
		{Code: condition.NameserverDown, Title: "all nameservers reply"},
		{Code: "unread", Title: "there is a token", Unknown: "no token is sent"},
	}
	if found {
		all[0].Problems = []condition.Problem{{Severity: condition.Minor, What: "queries fail"}}
		all[1].Problems = []condition.Problem{{Severity: condition.Severe, Subject: "10.96.0.10", What: "10.96.0.10 does not reply"}}
	}
	return all
}

// summary returns the codes of a report.
func summary(r condition.Report) string {
	codes := func(list []condition.Result) (codes []condition.Code) {
		for _, one := range list {
			codes = append(codes, one.Code)
		}
		return codes
	}
	found := func(list []condition.Problem) (codes []condition.Code) {
		for _, one := range list {
			codes = append(codes, one.Code)
		}
		return codes
	}
	return fmt.Sprint(found(r.Problems), found(r.Suspected), codes(r.OK), codes(r.Unknown))
}

// R15: there are three results. A problem comes before a warning, and what another problem explains is not known.
func TestJudge(t *testing.T) {
	t.Parallel()
	if got := summary(condition.Judge(down(false))); got != "[] [] [consequence nameserver_down] [unread]" {
		t.Error(got)
	}
	report := condition.Judge(down(true))
	if got := summary(report); got != "[nameserver_down] [] [] [consequence unread]" || report.Worst() != condition.Severe {
		t.Error(got)
	}
	if got := report.Unknown[0].Reason; got != "10.96.0.10 does not reply" {
		t.Errorf("the consequence is left out because %q", got)
	}
	warnings := []condition.Condition{{Code: "a", Problems: []condition.Problem{{Severity: condition.Minor}}}}
	if got := condition.Judge(warnings).Worst(); got != condition.Minor {
		t.Error(got)
	}
	report = condition.Judge(slices.Concat(warnings, down(true)))
	if got := summary(report); got != "[nameserver_down a] [] [] [consequence unread]" {
		t.Error(got)
	}
}

// R15: a problem is raised after 15 s in which each reading has shown it, and cleared 15 s after the last one that has.
func TestWindow(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var w condition.Window
		begun := time.Now()
		step := func(after time.Duration, found bool, raised, suspected int) condition.Report {
			t.Helper()
			time.Sleep(after) //nolint:forbidigo // synctest advances the time
			w.Add(time.Now(), down(found))
			r := condition.Judge(w.Conditions(time.Now()))
			if len(r.Problems) != raised || len(r.Suspected) != suspected {
				t.Errorf("after %v: %s; want %d, %d", time.Since(begun), summary(r), raised, suspected)
			}
			return r
		}
		step(0, true, 0, 1)
		step(14*time.Second, true, 0, 1)
		step(time.Second, false, 0, 0) // one reading without it: it did not last
		step(time.Second, true, 0, 1)
		since := time.Now()
		step(10*time.Second, true, 0, 1)
		if got := step(5*time.Second, true, 1, 0).Problems[0]; !got.Since.Equal(since) || got.Code != condition.NameserverDown {
			t.Errorf("%s since %v, want %v", got.Code, got.Since, since)
		}
		step(14*time.Second, false, 1, 0)
		step(0, true, 1, 0) // it flaps
		step(14*time.Second, false, 1, 0)
		step(time.Second, false, 0, 0)
		step(time.Second, true, 0, 1)
	})
}

// R15: what is certain is raised at once. Nothing is ok that was not looked at lately.
func TestCertain(t *testing.T) {
	t.Parallel()
	var w condition.Window
	now := time.Unix(1_000_000, 0)
	if got := w.Conditions(now); len(got) > 0 {
		t.Errorf("before the first reading: %v", got)
	}
	expired := condition.Condition{Code: "token_expired", Problems: []condition.Problem{{Severity: condition.Severe, Certain: true}}}
	w.Add(now, append(down(false), expired))
	if got := summary(condition.Judge(w.Conditions(now))); got != "[token_expired] [] [consequence nameserver_down] [unread]" {
		t.Error(got)
	}
	if got := summary(condition.Judge(w.Conditions(now.Add(time.Minute)))); got != "[token_expired] [] [] [consequence nameserver_down unread]" {
		t.Error(got)
	}
}
