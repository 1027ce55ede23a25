package agent

import (
	"testing"
	"time"
)

// R15, K10: a program that changes the rules again and again is a problem; loading a firewall, or a change an hour, is not.
func TestRepairs(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		apart time.Duration
		times int
		want  bool
	}{
		"again and again":        {10 * time.Second, 4, true},
		"thrice":                 {10 * time.Second, 3, false},
		"a firewall is loaded":   {time.Second, 8, false},
		"each hour":              {time.Hour, 8, false},
		"each minute, for hours": {time.Minute, 200, true},
		"each 90 s, for hours":   {90 * time.Second, 200, false},
	} {
		var r repairs
		now, again := time.Unix(1_000_000, 0), false
		for i := range tc.times {
			_, again = r.note(now, uint64(i+1)) //nolint:gosec // small
			now = now.Add(tc.apart)
		}
		if again != tc.want {
			t.Errorf("%s: %v", name, again)
		}
		if _, again = r.note(now.Add(time.Minute), r.count); again {
			t.Errorf("%s: a minute later", name)
		}
	}
}
