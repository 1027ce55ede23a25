package discovery

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// An object that becomes broken stays in use in its last good form until it is repaired.
func TestBrokenEditKeepsLastGood(t *testing.T) {
	t.Parallel()
	const (
		web  = "apiVersion: v1\nkind: Service\nmetadata: {name: web, namespace: shop}\nspec: {clusterIP: 10.0.0.1}\n"
		cart = "---\napiVersion: v1\nkind: Service\nmetadata: {name: cart, namespace: shop}\nspec: {clusterIP: %s}\n"
	)
	dir := t.TempDir()
	write(t, dir, "shop.yaml", web+fmt.Sprintf(cart, "10.0.0.2"))
	logs, reg := &testlog.Buffer{}, prometheus.NewRegistry()
	r := start(t, Config{ConfigDir: dir, Logger: logs.Logger(), Registerer: reg})
	c := openDelta(t, r, node(t, "shop"), nil)
	c.next()
	ips := func() string { return fmt.Sprint(ipsOf(t, merged(t, c.state()))) }
	before := ips()

	// An invalid value: the error names the object, and its last good form stays in use.
	write(t, dir, "shop.yaml", web+fmt.Sprintf(cart, "[10.0.0.3]"))
	wait.Until(t, "an error", func() bool { return len(r.Errors()) == 1 })
	e := r.Errors()[0]
	if e.Error() != "shop.yaml:9: spec.clusterIP: want a string, got a list" || !e.Kept {
		t.Errorf("error %q, kept %t", e, e.Kept)
	}
	c.quiet()
	if n := testutil.ToFloat64(r.metrics.broken); n != 1 {
		t.Errorf("%v errors in the metric", n)
	}

	// The document is no longer YAML, so its object is not known: all objects of the file
	// stay in use, and readable ones are updated.
	write(t, dir, "shop.yaml", strings.Replace(web, "10.0.0.1", "10.0.0.9", 1)+"---\n\tnot: [yaml\n")
	c.next()
	if got, want := ips(), strings.Replace(before, "10.0.0.1", "10.0.0.9", 1); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	if n := logs.Count("broken document"); n != 2 {
		t.Errorf("%d lines about broken documents, want 2", n)
	}

	// An edit of another file does not log it again.
	write(t, dir, "other.yaml", svc("new", "clusterIP: 10.0.0.4"))
	c.next()
	if n := logs.Count("broken document"); n != 2 {
		t.Errorf("%d lines about broken documents after another edit, want 2", n)
	}

	// The file is repaired, without cart: now cart is removed.
	write(t, dir, "shop.yaml", web)
	for strings.Contains(ips(), "cart") {
		c.next()
	}
	if got := ips(); !strings.Contains(got, "10.0.0.1") || len(r.Errors()) != 0 {
		t.Errorf("after the repair: %s, %v", got, r.Errors())
	}
	c.quiet()
}

// A new server has no last good form, so the broken object is left out.
func TestBrokenAtStartIsLeftOut(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, dir, "sub/a.yaml", svc("web", "clusterIP: x")+svc("cart", "clusterIP: 10.0.0.1"))
	write(t, dir, "b.yaml", svc("cart", "clusterIP: 10.0.0.2"))
	table, errs, err := Table(t.Context(), Config{ConfigDir: dir}, Client{Namespace: "shop"})
	if err != nil {
		t.Fatal(err)
	}
	// If two objects have the same name, the first file's is used, and the other one is
	// an error.
	if got := fmt.Sprint(show(table)); got != "map[cart.shop.svc.cluster.local:Kubernetes cart.shop 10.0.0.2]" {
		t.Errorf("got %s", got)
	}
	want := []string{
		`sub/a.yaml:2: spec.clusterIP: want an IP address, got "x"`,
		"sub/a.yaml:4: metadata.name: Service shop/cart is already in b.yaml:2; this one is ignored",
	}
	if fmt.Sprint(errs) != fmt.Sprint(want) {
		t.Errorf("got  %q\nwant %q", errs, want)
	}
}

func TestNotesAreLoggedOnce(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, dir, "a.yaml", "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\n---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: b}\n")
	logs := &testlog.Buffer{}
	r := start(t, Config{ConfigDir: dir, AllowEmpty: true, Logger: logs.Logger()})
	c := openDelta(t, r, node(t, "shop"), nil)
	c.next()
	for i := range 3 {
		write(t, dir, "b.yaml", svc("web", fmt.Sprintf("clusterIP: 10.0.0.%d", i+1)))
		c.next()
	}
	if n := logs.Count("ConfigMap"); n != 1 {
		t.Errorf("%d lines about ConfigMaps, want 1", n)
	}
}

// A mounted ConfigMap is a chain of links that Kubernetes replaces in one step.
func TestConfigMapSwap(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	version := func(n int) string { return fmt.Sprintf("..2026_01_0%d", n) }
	put := func(n int) {
		write(t, filepath.Join(dir, version(n)), "web.yaml", svc("web", fmt.Sprintf("clusterIP: 10.0.0.%d", n)))
		write(t, filepath.Join(dir, version(n), "sub"), "cart.yaml", svc("cart", fmt.Sprintf("clusterIP: 10.0.1.%d", n)))
		tmp := filepath.Join(dir, "..data_tmp")
		if err := os.Symlink(version(n), tmp); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(tmp, filepath.Join(dir, "..data")); err != nil {
			t.Fatal(err)
		}
	}
	put(1)
	for _, name := range []string{"web.yaml", "sub"} {
		if err := os.Symlink(filepath.Join("..data", name), filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	// A link to a parent directory must not be followed forever.
	if err := os.Symlink(dir, filepath.Join(dir, "loop")); err != nil {
		t.Fatal(err)
	}
	r := start(t, Config{ConfigDir: dir})
	c := openDelta(t, r, node(t, "shop"), nil)
	for n := 1; n <= 4; n++ {
		if n > 1 {
			put(n)
			if err := os.RemoveAll(filepath.Join(dir, version(n-1))); err != nil {
				t.Fatal(err)
			}
		}
		want := fmt.Sprintf("map[cart.shop.svc.cluster.local:10.0.1.%d web.shop.svc.cluster.local:10.0.0.%d]", n, n)
		for {
			c.next()
			if got := fmt.Sprint(ipsOf(t, merged(t, c.state()))); got == want {
				break
			}
		}
	}
	c.quiet()
}

// The table stays while the directory itself is missing.
func TestDirectoryGoesAway(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "config")
	write(t, dir, "a.yaml", svc("web", "clusterIP: 10.0.0.1"))
	logs := &testlog.Buffer{}
	r := start(t, Config{ConfigDir: dir, Logger: logs.Logger()})
	c := openDelta(t, r, node(t, "shop"), nil)
	c.next()
	if err := os.Rename(dir, dir+".old"); err != nil {
		t.Fatal(err)
	}
	wait.Until(t, "a line in the log", func() bool { return logs.Count("the current tables stay") == 1 })
	c.quiet()
	write(t, dir, "a.yaml", svc("web", "clusterIP: 10.0.0.2"))
	c.next()
	write(t, dir, "a.yaml", svc("web", "clusterIP: 10.0.0.3"))
	c.next()
	if got := fmt.Sprint(ipsOf(t, merged(t, c.state()))); !strings.Contains(got, "10.0.0.3") {
		t.Errorf("got %s", got)
	}
}

// The directory is read even during continuous edits.
func TestDebounceIsBounded(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	r := start(t, Config{ConfigDir: dir, AllowEmpty: true, Debounce: 50 * time.Millisecond})
	c := openDelta(t, r, node(t, "shop"), nil)
	c.next()
	stop := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			case <-time.After(10 * time.Millisecond):
				_ = os.WriteFile(filepath.Join(dir, "a.yaml"), []byte(svc("web", fmt.Sprintf("clusterIP: 10.0.0.%d", i%250+1))), 0o644)
			}
		}
	}()
	c.next()
	close(stop)
	<-done
}

// D18: a file that is rewritten in place is first empty and then half written. Its
// objects stay in use meanwhile, and after a while there is an error.
func TestHalfWrittenFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	web, cart := svc("web", "clusterIP: 10.0.0.1"), svc("cart", "clusterIP: 10.0.0.2")
	write(t, dir, "a.yaml", web+cart)
	write(t, dir, "b.yaml", svc("other", "clusterIP: 10.0.0.9"))
	r := start(t, Config{ConfigDir: dir})
	c := openDelta(t, r, node(t, "shop"), nil)
	c.next()
	path := filepath.Join(dir, "a.yaml")
	if err := os.Truncate(path, 0); err != nil {
		t.Fatal(err)
	}
	wait.Until(t, "the empty file is named", func() bool {
		errs := r.Errors()
		return len(errs) == 1 && errs[0].Kept && strings.HasPrefix(errs[0].Error(), "a.yaml: is empty: ")
	})
	// While the file is written in parts, web gets its new address and cart is never
	// missing.
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range []string{strings.Replace(web, "10.0.0.1", "10.0.0.3", 1), cart} {
		if _, err := f.WriteString(part); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	for !strings.Contains(fmt.Sprint(ipsOf(t, merged(t, c.state()))), "10.0.0.3") {
		if got := fmt.Sprint(ipsOf(t, c.next().tables[""])); !strings.Contains(got, "cart") {
			t.Fatalf("cart is missing: %s", got)
		}
	}
	// A document that is deleted in place is removed after a moment.
	if err := os.WriteFile(path, []byte(web), 0o644); err != nil {
		t.Fatal(err)
	}
	for strings.Contains(hostsOf(t, c), "cart") {
		c.next()
	}
	if got := hostsOf(t, c); got != "map[other.shop.svc.cluster.local:10.0.0.9 web.shop.svc.cluster.local:10.0.0.1]" {
		t.Errorf("got %s", got)
	}
	// A removed file is removed, too.
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(ipsOf(t, c.next().tables[""])); got != "map[other.shop.svc.cluster.local:10.0.0.9]" {
		t.Errorf("got %s", got)
	}
}

// A state directory that fails later is logged once. New VIPs are served, and saved when
// that works again.
func TestStateDirFailsLater(t *testing.T) {
	t.Parallel()
	dir, state := t.TempDir(), filepath.Join(t.TempDir(), "state")
	write(t, dir, "a.yaml", vipEntry("a.example.com"))
	logs := &testlog.Buffer{}
	r := start(t, Config{ConfigDir: dir, StateDir: state, Logger: logs.Logger()})
	c := openDelta(t, r, node(t, "shop", "DNS_AUTO_ALLOCATE", "true"), nil)
	c.next()
	if err := os.Rename(state, state+".away"); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Dir(state), filepath.Base(state), "a file in its place")
	for i, hosts := range [][]string{{"a.example.com", "b.example.com"}, {"a.example.com", "b.example.com", "c.example.com"}} {
		write(t, dir, "a.yaml", vipEntry(hosts...))
		if n := len(c.next().tables[""].GetTable()); n != i+2 {
			t.Errorf("%d hosts, want %d", n, i+2)
		}
	}
	if n := logs.Count("cannot save the automatic VIPs"); n != 1 {
		t.Errorf("%d lines about saving, want 1", n)
	}
	if err := errors.Join(os.Remove(state), os.Rename(state+".away", state)); err != nil {
		t.Fatal(err)
	}
	write(t, dir, "b.yaml", svc("web", "clusterIP: 10.0.0.1"))
	c.next()
	if v, err := loadVIPs(state); err != nil || v.Len() != 3 {
		t.Errorf("saved: %v, %v", v, err)
	}
}

// Reading unchanged files builds nothing.
func TestSameFilesBuildNothing(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, dir, "a.yaml", vipEntry("a.example.com"))
	r := start(t, Config{ConfigDir: dir})
	c := openDelta(t, r, node(t, "shop", "DNS_AUTO_ALLOCATE", "true"), nil)
	c.next()
	before := testutil.ToFloat64(r.metrics.builds)
	write(t, dir, "a.yaml", vipEntry("a.example.com"))
	write(t, dir, "notes.txt", "no objects")
	c.quiet()
	if n := testutil.ToFloat64(r.metrics.builds); n != before {
		t.Errorf("%v builds, want %v", n, before)
	}
	write(t, dir, "a.yaml", vipEntry("b.example.com"))
	c.next()
	wait.Until(t, "the build is counted", func() bool { return testutil.ToFloat64(r.metrics.builds) > before })
}
