package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/nametap/nametap/dnsproxy/guard"
)

// output runs a command, and returns its exit code, its output and its error.
func output(t *testing.T, args ...string) (code int, text string, err error) {
	t.Helper()
	var out strings.Builder
	root := newRootCommand()
	root.SetArgs(args)
	root.SetOut(&out)
	err = root.ExecuteContext(t.Context())
	return exitCode(err), out.String(), err
}

func writeTemp(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// writeRecords writes a file with records.
func writeRecords(t *testing.T, names ...guard.Record) string {
	t.Helper()
	text, err := json.Marshal(guard.Records{Since: time.Now(), Names: names})
	if err != nil {
		t.Fatal(err)
	}
	return writeTemp(t, guard.RecordsFile, string(text))
}

// G15: what guard check finds in a policy.
func TestGuardCheck(t *testing.T) {
	for _, c := range []struct{ policy, want string }{
		{"mode: audit\n", ""},
		{"allow: [{names: [a.example, '*.b.example.co.uk', '*.internal']}]\ndirect: [10.0.0.0/8, '10.1.0.1:443']\ndeny: [{names: ['*.com']}]\n", ""},
		{"allow:\n- {names: ['*.example.com', '*.com', '*.co.uk', '*.github.io']}\n", "GUARD:2: *.com: everybody\nGUARD:2: *.co.uk: everybody\nGUARD:2: *.github.io: everybody\n"},
		{"allow:\n- names: [a.b.example, '*.c.b.example', b.example]\ndeny:\n- names: ['*.b.example']\n",
			"GUARD:2: a.b.example: it is allowed in vain, since line 4\nGUARD:2: *.c.b.example: it is allowed in vain, since line 4\n"},
		{"allow: [{names: [a.example]}]\ndirect: ['0.0.0.0/0']\n", "guard policy GUARD: line 2: direct \"0.0.0.0/0\": it has all addresses"},
		{"allowed: []\n", "guard policy GUARD: line 1: field allowed not found"},
		{"allow: [{names: [a.example, a.example]}]\n", "guard policy GUARD: line 1: name \"a.example\": it is in line 1, too"},
		{"allow: [{names: [a.example]}]\ndeny: [{names: [a.example]}]\n", "guard policy GUARD: line 2: name \"a.example\": line 1 allows it"},
	} {
		path := writeTemp(t, "guard.yaml", c.policy)
		code, text, _ := output(t, "guard", "check", path)
		text = strings.ReplaceAll(text, path, "GUARD")
		if c.want == "" {
			if code != 0 || !strings.HasPrefix(text, "GUARD: no findings: mode ") {
				t.Errorf("%q: exit code %d, %s", c.policy, code, text)
			}
			continue
		}
		lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
		wanted := strings.Split(strings.TrimSuffix(c.want, "\n"), "\n")
		same := code == exitFailed && len(lines) == len(wanted)
		for i := 0; same && i < len(lines); i++ {
			same = strings.HasPrefix(lines[i], wanted[i])
		}
		if !same {
			t.Errorf("%q: exit code %d, output\n%swant\n%s", c.policy, code, text, c.want)
		}
	}
	policy, other := writeTemp(t, "guard.yaml", "mode: audit\n"), writeTemp(t, "other.json", "{}")
	for _, args := range [][]string{{}, {"absent.yaml"}, {policy, "--against", "absent.json"}, {policy, "--against", policy}, {policy, "--against", other}} {
		if code, text, err := output(t, append([]string{"guard", "check"}, args...)...); code != exitUsage || err == nil {
			t.Errorf("%q: exit code %d, %s, error %v", args, code, text, err)
		}
	}
}

// G15: what a policy would deny of what was recorded: names that exist or were connected to, ports, types, private
// addresses, and addresses without a name.
func TestGuardCheckAgainst(t *testing.T) {
	policy := writeTemp(t, "guard.yaml", `allow:
- names: [a.example, "*.b.example"]
- {names: [mail.example], types: [MX]}
deny:
- names: [bad.b.example]
direct: ["192.0.2.0/24", "198.51.100.7:443"]
`)
	one := []uint16{443}
	records := writeRecords(t,
		guard.Record{Name: "a.example", Exists: true, Asked: 3, Ports: []uint16{443, 8443}},
		guard.Record{Name: "a.example.ns1.svc.cluster.local", Asked: 3},
		guard.Record{Name: "x.b.example", Exists: true, Types: []string{"TXT"}},
		guard.Record{Name: "bad.b.example", Exists: true, Asked: 7},
		guard.Record{Name: "mail.example", Exists: true, Types: []string{"MX"}, Private: true},
		guard.Record{Name: "c.example", Asked: 2, Ports: one},
		guard.Record{Name: "192.0.2.9", Ports: one}, guard.Record{Name: "198.51.100.7", Ports: one}, guard.Record{Name: "198.51.100.8", Ports: one},
	)
	code, text, _ := output(t, "guard", "check", policy, "--against", records)
	want := []string{
		"198.51.100.8 port 443 would be refused",
		"a.example port 8443 would be refused: no rule has it",
		"bad.b.example would be denied (asked 7 times",
		"c.example would be denied (asked 2 times",
		"mail.example would be refused: it leads to a private address",
		"x.b.example TXT would be denied",
	}
	lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	if code != exitFailed || len(lines) != len(want) {
		t.Fatalf("exit code %d:\n%s", code, text)
	}
	for i, line := range lines {
		if !strings.Contains(line, want[i]) {
			t.Errorf("%s\nwant %s", line, want[i])
		}
	}
}

// G14: a policy from the records of two agents. It has no findings, and denies nothing of what was recorded.
func TestGuardLearn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		now := time.Now()
		record := func(name string, asked uint64, port uint16, ago time.Duration) guard.Record {
			return guard.Record{Name: name, Exists: true, Asked: asked, Ports: []uint16{port}, Last: now.Add(-ago)}
		}
		var first, second []guard.Record
		for i := range 5 {
			first = append(first,
				record(fmt.Sprintf("%d.pkg.example.net", i), 10, 443, time.Hour*3), record(fmt.Sprintf("%d.co.uk", i), 1, 443, 0),
				record(fmt.Sprintf("%d.deep.pkg.example.net", i), 1, 443, time.Minute*4))
		}
		for i := range 4 {
			first = append(first, record(fmt.Sprintf("%d.few.example", i), 1, 443, 48*time.Hour))
		}
		mail := guard.Record{Name: "mail.example", Exists: true, Asked: 2, Types: []string{"MX", "TXT"}, Last: now}
		git, again := record("git.example", 4, 22, 0), record("git.example", 8, 443, time.Minute)
		git.Private = true
		first = append(first, git, mail, record("alone.pkg.example.net", 1, 8443, 0), record("x.y.pkg.example.net", 1, 443, 0),
			guard.Record{Name: "10.96.0.1", Ports: []uint16{443}, Last: now},
			guard.Record{Name: "git.example.ns1.svc.cluster.local", Asked: 12, Last: now},
			guard.Record{Name: "1.2.0.192.in-addr.arpa", Exists: true, Types: []string{"PTR"}, Last: now},
			guard.Record{Name: "bad.example", Exists: true, Verdict: guard.VerdictDenied, Rule: "guard.yaml:9", Last: now})
		second = append(second, again)
		files := []string{writeRecords(t, first...), writeRecords(t, second...)}
		code, text, err := output(t, append([]string{"guard", "learn"}, files...)...)
		if err != nil {
			t.Fatal(code, err)
		}
		want := `# Written by nametap guard learn.
mode: enforce
allow:
- names:
  - "*.deep.pkg.example.net"                  # 5 names, asked 5 times, last 4m ago
  - "*.pkg.example.net"                       # 5 names, asked 50 times, last 3h0m ago
  - "0.co.uk"                                 # asked 1 times, last 0s ago
  - "0.few.example"                           # asked 1 times, last 48h0m ago
  - "1.co.uk"                                 # asked 1 times, last 0s ago
  - "1.few.example"                           # asked 1 times, last 48h0m ago
  - "2.co.uk"                                 # asked 1 times, last 0s ago
  - "2.few.example"                           # asked 1 times, last 48h0m ago
  - "3.co.uk"                                 # asked 1 times, last 0s ago
  - "3.few.example"                           # asked 1 times, last 48h0m ago
  - "4.co.uk"                                 # asked 1 times, last 0s ago
  - "x.y.pkg.example.net"                     # asked 1 times, last 0s ago
- names:
  - "git.example"                             # asked 12 times, last 0s ago
  ports: [22, 443]
- names:
  - "alone.pkg.example.net"                   # asked 1 times, last 0s ago
  ports: [8443]
- names:
  - "mail.example"                            # asked 2 times, last 0s ago
  types: [MX, TXT]
deny:
- names:
  - "bad.example"                             # connected to, last 0s ago
direct:
- "10.96.0.1:443"                             # connected to, last 0s ago
private: allow  # git.example leads to a private address
`
		if diff := cmp.Diff(want, text); diff != "" {
			t.Errorf("(-want +got)\n%s", diff)
		}
		policy := writeTemp(t, "guard.yaml", text)
		if code, text, err := output(t, "guard", "check", policy, "--against", files[0], "--against", files[1]); code != exitFailed ||
			strings.Count(text, "\n") != 1 || !strings.Contains(text, "bad.example would be denied") {
			t.Errorf("exit code %d, error %v, output %s", code, err, text)
		}
		if code, _, err := output(t, "guard", "learn", "--since", "1s", files[1]); code != exitFailed || !strings.Contains(err.Error(), "nothing was recorded") {
			t.Errorf("exit code %d, error %v", code, err)
		}
	})
}
