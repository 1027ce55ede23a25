package main

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/process"
	"github.com/nametap/nametap/internal/testkit/wait"

	"github.com/nametap/nametap/bench/agents/fleet"
	"github.com/nametap/nametap/bench/report"
)

func TestMain(m *testing.M) {
	wait.Together()
	m.Run()
}

// With a real nametap-discovery, over TLS, agents that connect again, that are slow and that
// move between replicas have the table of the server. The figures come from a small run.
func TestExperiments(t *testing.T) { // D34
	built, err := process.Build("nametap-discovery")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(built) })
	runs := []string{"push,churn,replicas", "reconnect", "slow,list,day"} // two go from one replica to two
	if got, want := strings.Split(strings.Join(runs, ","), ","), experiments(); !slices.Equal(slices.Sorted(slices.Values(got)), slices.Sorted(slices.Values(want))) {
		t.Errorf("experiments %q, want %q", got, want)
	}
	for _, names := range runs {
		t.Run(names, func(t *testing.T) {
			t.Parallel()
			var progress bytes.Buffer
			line := "-tls -agents=12 -full=4 -hosts=300 -namespaces=3 -repeats=2 -for=2s -churn=10 -rate=20 -run=" + names
			o, err := parseOptions(append(strings.Fields(line), "-discovery="+filepath.Join(built, "nametap-discovery")), &progress)
			if err != nil {
				t.Fatal(err)
			}
			o.json = filepath.Join(t.TempDir(), "figures.json")
			if err := run(t.Context(), o); err != nil {
				t.Fatalf("%v\n%s", err, progress.String())
			}
			text, err := os.ReadFile(o.json)
			want := len(o.run) + min(len(o.run), 2) // with the times of connecting to one replica, and to two
			if n := strings.Count(string(text), `"experiment"`); err != nil || n != want {
				t.Errorf("%v: figures of %d experiments, want %d: %s", err, n, want, text)
			}
		})
	}
}

func TestOptions(t *testing.T) {
	for _, line := range []string{
		"-run=unknown", "-mode=unknown", "-variant=unknown", "-agents=0", "rest", "-target=a,b,c", "-target=a,b,1,hosts",
		"-target=a,b,1,other -api=x", "-target=a,b,1,hosts -api=x -run=day",
	} {
		if _, err := parseOptions(strings.Fields(line), new(bytes.Buffer)); err == nil {
			t.Errorf("%s: no error", line)
		}
	}
	o, err := parseOptions(strings.Fields("-run=push,reconnect -api=https://x -token=t -target=istiod,127.0.0.1:1,2,plain -target=nametap,127.0.0.1:3,4,hosts"), new(bytes.Buffer))
	if err != nil || len(o.targets) != 2 || o.targets[0] != (target{"istiod", "127.0.0.1:1", 2, fleet.Plain}) {
		t.Errorf("%+v, %v", o.targets, err)
	}
}

// The authority signs the certificates, and they name their owners.
func TestCertificates(t *testing.T) {
	c, err := newCertificates(t.TempDir(), []string{"shop"})
	if err != nil {
		t.Fatal(err)
	}
	pair, err := tls.LoadX509KeyPair(c.path("tls.crt"), c.path("tls.key"))
	if err != nil {
		t.Fatal(err)
	}
	roots := c.configs("shop").RootCAs
	if _, err := pair.Leaf.Verify(x509.VerifyOptions{Roots: roots, DNSName: serverName}); err != nil {
		t.Error(err)
	}
	client, err := x509.ParseCertificate(c.configs("shop").Certificates[0].Certificate[0])
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}); err != nil {
		t.Error(err)
	}
	if len(client.URIs) != 1 || client.URIs[0].String() != "spiffe://cluster.local/ns/shop/sa/default" {
		t.Errorf("%v", client.URIs)
	}
}

// A table has a column for each control plane, and the ratios to the first one.
func TestTable(t *testing.T) {
	first, second := &figures{Plane: "istiod"}, &figures{Plane: "nametap-discovery"}
	first.add("µs", 1000)
	first.add("alone", 2.5)
	first.add("failures", 3)
	second.add("failures", 0)
	second.add("µs", 10)
	got := table("Title", []*figures{first, second}).Text()
	want := report.Table{
		Title: "Title", Header: []string{"figure", "istiod", "nametap-discovery", "istiod ÷ nametap-discovery"},
		Rows: [][]string{{"µs", "1,000", "10.0", "100"}, {"alone", "2.50", "–", "–"}, {"failures", "3", "0", "–"}},
	}.Text()
	if got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
	first.addTimes("none", nil)
	if first.addTimes("time", fleet.Times{time.Second}); len(first.Figures) != 6 {
		t.Errorf("%v", first.Figures)
	}
}

func TestWithHeaders(t *testing.T) {
	for bytes, want := range map[float64]float64{100: 152, 1448: 1500, 1449: 1553} {
		if got := withHeaders(bytes); got != want {
			t.Errorf("%v bytes: %v, want %v", bytes, got, want)
		}
	}
}
