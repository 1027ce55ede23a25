package vm_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/seen"
	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/load"
	"github.com/nametap/nametap/test/machines/vm"
)

const (
	floodUnits   = 10
	floodRate    = 200 // queries a second of each unit
	floodFor     = 5 * time.Second
	floodLeast   = 9900 // of 10,000: a busy machine is late, or loses some
	keptFailures = 1000 // failures that the agent keeps
	// noteTime is how long it takes to note a failure after its time was taken.
	noteTime = 100 * time.Millisecond
)

// R13: of 10,000 failures in 5 s, of ten programs in ten units, `nametap tail --failed` has the
// last 1,000, each with its unit. Failures that a running tail shows have their units, too.
func TestFloodOfFailures(t *testing.T) {
	m := vm.Boot(t)
	m.Install()
	m.Start()
	var asked arrivals
	m.World.Named.Handle(asked.fail)
	installLoad(t, m)
	m.Run("systemd-run", "--quiet", "--unit=follow", "--property=StandardOutput=file:/run/followed", "--property=StandardError=journal", "nametap", "tail", "--failed", "--output=json")
	wait.Until(t, "tail follows", func() bool {
		m.Lookup("first.example")
		return strings.Contains(m.Read("/run/followed"), "first.example.")
	})
	for i := range floodUnits {
		m.Run("systemd-run", "--quiet", "--unit="+floodUnit(i), fmt.Sprintf("--property=StandardOutput=file:/run/report-%d", i),
			"/usr/local/bin/nametap-load", "-expect", fmt.Sprintf("/etc/flood-%d.json", i), "-rate", strconv.Itoa(floodRate), "-for", floodFor.String())
	}
	sent, failed := 0, 0
	var first, last time.Time
	for i := range floodUnits {
		report := awaitReport(t, m, i)
		sent += report.Queries
		failed += report.Count(load.Right)
		if first.IsZero() || report.Began.Before(first) {
			first = report.Began
		}
		if report.Ended.After(last) {
			last = report.Ended
		}
	}
	names := asked.names()
	t.Logf("%d queries of %d units in %v, %d failed; the nameserver was asked for %d names", sent, floodUnits, last.Sub(first).Round(time.Millisecond), failed, len(names))
	if min(failed, len(names)) < floodLeast {
		t.Errorf("%d queries for %d names failed, want about 10,000", failed, len(names))
	}
	ring := flooded(t, m.Run("nametap", "tail", "--failed", "--no-follow", "--output=json"))
	attributed := checkAttributed(t, ring)
	t.Logf("of the last %d failures, %d are attributed to their units", len(ring), attributed)
	if len(ring) != keptFailures || attributed != keptFailures {
		t.Errorf("%d failures are kept, %d of them are attributed, want %d", len(ring), attributed, keptFailures)
	}
	m.Run("systemctl", "stop", "follow.service")
	followed := flooded(t, m.Read("/run/followed"))
	for _, r := range followed {
		names[strings.ToLower(r.Name)] = r.Time // when it was answered
	}
	checkLast(t, ring, names)
	lost := 0
	if match := regexp.MustCompile(`(\d+) more queries came faster`).FindStringSubmatch(m.Journal("follow.service")); match != nil {
		lost, _ = strconv.Atoi(match[1])
	}
	attributed = checkAttributed(t, followed)
	t.Logf("tail has shown %d failures meanwhile, and lost %d; %d are attributed, %d lookups were left out", len(followed), lost, attributed, len(followed)-attributed)
	if attributed != len(followed) || len(followed)+lost < floodLeast {
		t.Errorf("of %d failures that were shown %d are attributed; %d were lost", len(followed), attributed, lost)
	}
}

// Arrivals are the times at which the nameserver was first asked for names.
type arrivals struct {
	mu    sync.Mutex
	times map[string]time.Time
}

// fail is the handler of the nameserver.
func (a *arrivals) fail(query *dns.Msg, network string) *dns.Msg {
	now, name := time.Now(), strings.ToLower(query.Question[0].Name)
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.times == nil {
		a.times = map[string]time.Time{}
	}
	if a.times[name].IsZero() && strings.Contains(name, ".flood-") {
		a.times[name] = now
	}
	return fakedns.Rcode(dns.RcodeServerFailure)(query, network)
}

// names returns the times by name.
func (a *arrivals) names() map[string]time.Time {
	a.mu.Lock()
	defer a.mu.Unlock()
	return maps.Clone(a.times)
}

// floodUnit returns the name of a unit without its suffix.
func floodUnit(i int) string { return fmt.Sprintf("flood-%d", i) }

// installLoad copies nametap-load to the machine, with what each unit asks: names below the name of the unit.
func installLoad(t *testing.T, m *vm.Machine) {
	t.Helper()
	path, err := load.Build(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile(path)
	if err == nil {
		err = os.WriteFile(filepath.Join(m.Root(), "usr/local/bin/nametap-load"), program, 0o755) //nolint:gosec // a program
	}
	if err != nil {
		t.Fatal(err)
	}
	for i := range floodUnits {
		text, err := json.Marshal(&load.Expectation{Questions: []load.Question{{Name: "*." + floodUnit(i) + ".example", Rcode: "SERVFAIL"}}})
		if err != nil {
			t.Fatal(err)
		}
		m.Write(fmt.Sprintf("/etc/flood-%d.json", i), string(text))
	}
}

// awaitReport returns the report of a unit after its end.
func awaitReport(t *testing.T, m *vm.Machine, i int) load.Report {
	t.Helper()
	var report load.Report
	wait.Until(t, floodUnit(i)+" reports", func() bool {
		return json.Unmarshal([]byte(m.Read(fmt.Sprintf("/run/report-%d", i))), &report) == nil
	})
	return report
}

// flooded returns the failures of the units in the output of tail. The last line may be a part of one.
func flooded(t *testing.T, output string) []seen.Record {
	t.Helper()
	var records []seen.Record
	for line := range strings.Lines(output) {
		var record seen.Record
		if err := json.Unmarshal([]byte(line), &record); err != nil && strings.HasSuffix(line, "\n") {
			t.Fatalf("%v in %s", err, line)
		}
		if strings.Contains(record.Name, ".flood-") {
			records = append(records, record)
		}
	}
	return records
}

// checkAttributed returns how many failures have a unit. It must be the right one.
func checkAttributed(t *testing.T, records []seen.Record) (attributed int) {
	t.Helper()
	for _, r := range records {
		labels := strings.Split(r.Name, ".")
		switch {
		case r.Unit == "":
		case len(labels) < 2 || r.Unit != labels[1]+".service":
			t.Errorf("%s is attributed to %s", r.Name, r.Unit)
		case r.UID == nil || *r.UID != 0 || r.Rcode != "SERVFAIL":
			t.Errorf("%+v", r)
		default:
			attributed++
		}
	}
	return attributed
}

// checkLast checks that the failures that are kept are the last ones: of each name that was answered, or for which the
// nameserver was asked, after the first of them had its answer.
func checkLast(t *testing.T, ring []seen.Record, names map[string]time.Time) {
	t.Helper()
	kept := map[string]bool{}
	var oldest time.Time
	for _, r := range ring {
		kept[strings.ToLower(r.Name)] = true
		if oldest.IsZero() || r.Time.Before(oldest) { // when it was answered
			oldest = r.Time
		}
	}
	if len(kept) != len(ring) {
		t.Errorf("%d names in %d records", len(kept), len(ring))
	}
	later := 0
	for name, at := range names {
		if !at.After(oldest.Add(noteTime)) {
			continue
		}
		if later++; !kept[name] {
			t.Errorf("%s failed later than others that are kept", name)
		}
	}
	t.Logf("%d of them are for names that failed, or were asked for, after the first of them", later)
}
