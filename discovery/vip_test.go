package discovery

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/internal/statedir"
	"github.com/nametap/nametap/internal/testkit/fakekube"
)

// vipEntry returns a ServiceEntry whose hosts need automatic VIPs.
func vipEntry(hosts ...string) string {
	return entry("vips", "hosts: ["+strings.Join(hosts, ", ")+"], resolution: DNS")
}

func ipsOf(t *testing.T, table *api.NameTable) map[string]string {
	t.Helper()
	out := map[string]string{}
	for host, info := range table.GetTable() {
		out[host] = strings.Join(info.GetIps(), " ")
	}
	return out
}

// preferredVIP returns the IPv4 address that a host gets if it is free.
func preferredVIP(host string) string {
	all := allOf([]object.Object{{
		Key:   object.Key{Kind: object.KindServiceEntry, Namespace: "shop", Name: "e"},
		Entry: &object.ServiceEntry{Hosts: []string{host}, Resolution: "DNS"},
	}})
	t, err := Client{Namespace: "shop", AutoAllocate: true}.table(all)
	if err != nil {
		panic(err)
	}
	return t.GetTable()[host].GetIps()[0]
}

// colliding returns n hosts that prefer the same VIP.
func colliding(n int) []string {
	byVIP := map[string][]string{}
	for i := 0; ; i++ {
		h := fmt.Sprintf("h%d.example.com", i)
		vip := preferredVIP(h)
		if byVIP[vip] = append(byVIP[vip], h); len(byVIP[vip]) == n {
			return byVIP[vip]
		}
	}
}

// A host keeps its VIP over restarts while other hosts are added and removed, even if a
// new host prefers the same slot and sorts first.
func TestVIPsSurviveRestarts(t *testing.T) {
	t.Parallel()
	names := colliding(4)
	dir, state := t.TempDir(), filepath.Join(t.TempDir(), "new", "state")
	want := map[string]string{}
	for i := len(names); i > 0; i-- {
		write(t, dir, "e.yaml", vipEntry(names[i-1:]...))
		r := start(t, Config{ConfigDir: dir, StateDir: state})
		c := openDelta(t, r, node(t, "shop", "DNS_AUTO_ALLOCATE", "true"), nil)
		got := ipsOf(t, c.next().tables[""])
		for host, ips := range want {
			if got[host] != ips {
				t.Errorf("%s moved from %s to %s", host, ips, got[host])
			}
		}
		want = got
		r.stop()
	}
	if len(want) != 4 {
		t.Fatalf("%d hosts, want 4", len(want))
	}

	// The hosts are removed before one restart and added again before the next.
	write(t, dir, "e.yaml", vipEntry("other.example.com"))
	start(t, Config{ConfigDir: dir, StateDir: state}).stop()
	write(t, dir, "e.yaml", vipEntry(names...))
	r := start(t, Config{ConfigDir: dir, StateDir: state})
	got := ipsOf(t, openDelta(t, r, node(t, "shop", "DNS_AUTO_ALLOCATE", "true"), nil).next().tables[""])
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("after delete and add\n%s", diff)
	}

	// Table returns the same VIPs, and writes nothing.
	table, errs, err := Table(t.Context(), Config{ConfigDir: dir, StateDir: state}, Client{Namespace: "shop", AutoAllocate: true})
	if err != nil || len(errs) > 0 {
		t.Fatal(err, errs)
	}
	if diff := cmp.Diff(want, ipsOf(t, table)); diff != "" {
		t.Errorf("Table\n%s", diff)
	}
}

// D54: a client gets automatic VIPs if it asks for them and does not say that it does not
// capture DNS. For other clients a host without an address is not in the table.
func TestAutoAllocateMetadata(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, dir, "e.yaml", vipEntry("a.example.com")+entry("e", "hosts: [b.example.com], addresses: [192.0.2.1]"))
	r := start(t, Config{ConfigDir: dir})
	for _, test := range []struct {
		asks, captures string
		want           int
	}{
		{"", "", 1}, {"", "true", 1}, {"false", "true", 1}, {"yes", "true", 1},
		{"true", "", 2}, {"true", "true", 2}, {"true", "false", 1},
	} {
		n := node(t, "shop", "DNS_AUTO_ALLOCATE", test.asks, "DNS_CAPTURE", test.captures)
		for name, value := range map[string]string{"DNS_AUTO_ALLOCATE": test.asks, "DNS_CAPTURE": test.captures} {
			if value == "" {
				delete(n.Metadata.Fields, name)
			}
		}
		if got := len(openSotw(t, r, n).next().tables["0"].GetTable()); got != test.want {
			t.Errorf("%+v: %d hosts", test, got)
		}
	}
}

// loadVIPs reads the VIPs of a state directory, and moves a damaged file aside.
func loadVIPs(state string) (*hosts.VIPs, error) {
	v := vips{VIPs: hosts.NewVIPs()}
	err := v.read(statedir.New(state, lockName).Load)
	return v.VIPs, err
}

// sum returns the checksum in a file.
func sum(data []byte) string { return fmt.Sprintf("%x", sha256.Sum256(data)) }

func TestDamagedState(t *testing.T) {
	t.Parallel()
	dir, state := t.TempDir(), t.TempDir()
	write(t, dir, "e.yaml", vipEntry("a.example.com", "b.example.com"))
	start(t, Config{ConfigDir: dir, StateDir: state}).stop()
	path := filepath.Join(state, vipsFile)
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if v, err := loadVIPs(state); err != nil || v.Len() != 2 {
		t.Fatalf("own state: %v, %v", v, err)
	}
	shared := `{"a":{"slot":257},"b":{"slot":257}}`
	unusable := `{"a":{"slot":255}}`
	for name, data := range map[string]string{
		"cut":      string(good[:len(good)/2]),
		"empty":    "",
		"edited":   strings.Replace(string(good), `"slot":`, `"slot":1`, 1),
		"foreign":  `{"format":"other/1"}`,
		"no hosts": `{"format":"` + vipsFormat + `"}`,
		"shared":   `{"format":"` + vipsFormat + `","sum":"` + sum([]byte(shared)) + `","data":` + shared + `}`,
		"unusable": `{"format":"` + vipsFormat + `","sum":"` + sum([]byte(unusable)) + `","data":` + unusable + `}`,
		"no map":   `{"format":"` + vipsFormat + `","sum":"` + sum([]byte("[]")) + `","data":[]}`,
	} {
		t.Run(name, func(t *testing.T) {
			if err := os.WriteFile(path, []byte(data), 0o600); err != nil {
				t.Fatal(err)
			}
			v, err := loadVIPs(state)
			if !errors.Is(err, statedir.ErrDamaged) || v.Len() != 0 {
				t.Fatalf("got %v, %v; want nothing and ErrDamaged", v, err)
			}
			if !strings.Contains(err.Error(), path) {
				t.Errorf("%q does not name the file", err)
			}
			if kept, err := os.ReadFile(path + ".damaged"); err != nil || string(kept) != data {
				t.Errorf("set aside: %q, %v", kept, err)
			}
			// The server starts all the same.
			if err := os.WriteFile(path, []byte(data), 0o600); err != nil {
				t.Fatal(err)
			}
			r := start(t, Config{ConfigDir: dir, StateDir: state})
			if n := len(openDelta(t, r, node(t, "shop", "DNS_AUTO_ALLOCATE", "true"), nil).next().tables[""].GetTable()); n != 2 {
				t.Errorf("%d hosts, want 2", n)
			}
			r.stop()
		})
	}
	if _, err := New(Config{ConfigDir: dir, StateDir: filepath.Join(path, "below")}); err == nil {
		t.Error("a state directory below a file is accepted")
	}
}

// C7: of two control planes with one state directory the second one does not start,
// because it would overwrite the VIPs of the first one.
func TestTwoServersOneStateDir(t *testing.T) {
	t.Parallel()
	dir, state := t.TempDir(), t.TempDir()
	write(t, dir, "e.yaml", vipEntry("a.example.com"))
	cfg := Config{ConfigDir: dir, StateDir: state}
	first := start(t, cfg)
	_, err := New(cfg)
	if !errors.Is(err, statedir.ErrTaken) || !strings.Contains(err.Error(), state) || !strings.HasSuffix(err.Error(), "(--state-dir)") {
		t.Errorf("second server: %v, want ErrTaken with the directory and the flag", err)
	}
	if _, _, err := Table(t.Context(), cfg, Client{Namespace: "shop"}); err != nil {
		t.Errorf("printing the table beside a running server: %v", err)
	}
	first.stop()
	// A server that failed to start has unlocked the directory.
	registry := prometheus.NewRegistry()
	if _, err := newMetrics(registry, newResourceMetrics(new(Server).Resources)); err != nil {
		t.Fatal(err)
	}
	failing := cfg
	failing.Registerer = registry
	if _, err := New(failing); err == nil {
		t.Fatal("metrics were registered twice")
	}
	start(t, cfg)
}

// TestStatusAddresses checks that the VIPs that a controller has written to the status of a
// ServiceEntry are used as long as the entry is eligible for them, and that no other host gets one
// of them.
func TestStatusAddresses(t *testing.T) { // D10
	t.Parallel()
	status := func(host string, addrs ...string) string {
		var list []string
		for _, a := range addrs {
			list = append(list, fmt.Sprintf("{host: %s, value: '%s'}", host, a))
		}
		return "status: {addresses: [" + strings.Join(list, ", ") + "]}\n"
	}
	taken := preferredVIP("free.example.com")
	objects := strings.Join([]string{
		entryYAML("given", "shop", "hosts: [Given.example.com]", "resolution: DNS") + status("Given.example.com", "240.240.0.9", "2001:2::9"),
		entryYAML("taken", "shop", "hosts: [taken.example.com]", "resolution: STATIC") + status("taken.example.com", taken),
		entryYAML("free", "shop", "hosts: [free.example.com]", "resolution: DNS"),
		entryYAML("same", "data", "hosts: [given.example.com]", "resolution: DNS"),
		entryYAML("addressed", "shop", "hosts: [addressed.example.com]", "resolution: DNS", "addresses: [192.0.2.1]") + status("addressed.example.com", "240.240.0.10"),
		entryYAML("none", "shop", "hosts: [none.example.com]", "resolution: NONE") + status("none.example.com", "240.240.0.11"),
		entryYAML("wildcard", "shop", "hosts: ['*.wild.example.com']", "resolution: DNS") + status("'*.wild.example.com'", "240.240.0.12"),
		strings.Replace(entryYAML("refused", "shop", "hosts: [refused.example.com]", "resolution: DNS"),
			"namespace: shop", "namespace: shop, labels: {networking.istio.io/enable-autoallocate-ip: 'false'}", 1) + status("refused.example.com", "240.240.0.13"),
		entryYAML("renamed", "shop", "hosts: [renamed.example.com]", "resolution: DNS") + status("before.example.com", "240.240.0.14"),
	}, "---\n")
	dir := t.TempDir()
	write(t, dir, "objects.yaml", objects)
	a := fakekube.Start(t)
	a.Put(fakekube.Definitions, entryDefinition)
	for document := range strings.SplitSeq(objects, "---\n") {
		a.Put(fakekube.ServiceEntries, document)
	}
	for name, cfg := range map[string]Config{"files": {ConfigDir: dir}, "API": onAPI(t, a)} {
		table, errs, err := Table(t.Context(), cfg, Client{Namespace: "shop", AutoAllocate: true})
		if err != nil || len(errs) > 0 {
			t.Fatal(errs, err)
		}
		got := map[string]string{}
		for host, info := range table.GetTable() {
			got[host] = strings.Join(info.GetIps(), " ")
		}
		free, renamed := got["free.example.com"], got["renamed.example.com"]
		if !strings.HasPrefix(free, "240.240.") || strings.HasPrefix(free, taken+" ") || !strings.HasPrefix(renamed, "240.240.") {
			t.Errorf("%s: free.example.com %q, renamed.example.com %q; %s is taken", name, free, renamed, taken)
		}
		delete(got, "free.example.com")
		delete(got, "renamed.example.com")
		want := map[string]string{"Given.example.com": "240.240.0.9 2001:2::9", "taken.example.com": taken, "addressed.example.com": "192.0.2.1"}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		table, _, err = Table(t.Context(), cfg, Client{Namespace: "shop"})
		if n := len(table.GetTable()); err != nil || n != 1 {
			t.Errorf("%s: a client that asks for no VIPs gets %d hosts, %v", name, n, err)
		}
	}
}
