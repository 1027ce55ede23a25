package discovery

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// D43: files that are renamed during a read, or removed and written again one after the
// other, as by git and scripts, do not remove hosts.
func TestFilesAreReplacedOneByOne(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	web, cart := svc("web", "clusterIP: 10.0.0.1"), svc("cart", "clusterIP: 10.0.0.2")
	write(t, dir, "a/web.yaml", web)
	write(t, dir, "a/cart.yaml", cart)
	write(t, dir, "other.yaml", svc("other", "clusterIP: 10.0.0.9"))
	r := start(t, Config{ConfigDir: dir})
	c := openDelta(t, r, node(t, "shop"), nil)
	c.next()
	before := hostsOf(t, c)
	read := testutil.ToFloat64(r.metrics.builds)
	if err := os.RemoveAll(filepath.Join(dir, "a")); err != nil {
		t.Fatal(err)
	}
	wait.Until(t, "it is read", func() bool { return testutil.ToFloat64(r.metrics.builds) > read })
	write(t, dir, "b/cart.yaml", cart)
	wait.Until(t, "it is read", func() bool { return testutil.ToFloat64(r.metrics.builds) > read+1 })
	write(t, dir, "b/web.yaml", web)
	c.quiet()
	if got := hostsOf(t, c); got != before {
		t.Errorf("got %s, want %s", got, before)
	}
	// A file that stays missing is removed soon, even while a link has no target.
	if err := os.Symlink("nowhere", filepath.Join(dir, "link.yaml")); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(dir, "b/cart.yaml")); err != nil {
		t.Fatal(err)
	}
	c.next()
	if got := hostsOf(t, c); strings.Contains(got, "cart") || !strings.Contains(got, "web") {
		t.Errorf("got %s", got)
	}
}

// An object of a removed file stays in use for at most 10 s, however often other files
// change. The same holds for an object that is missing when a process starts.
func TestRemovedObjectsSettle(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(t *testing.T, dir string){
		"removed": func(t *testing.T, dir string) {
			t.Helper()
			if err := os.Remove(filepath.Join(dir, "a.yaml")); err != nil {
				t.Fatal(err)
			}
		},
		"half written": func(t *testing.T, dir string) { t.Helper(); write(t, dir, "a.yaml", "# to be continued\n") },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				dir := t.TempDir()
				write(t, dir, "a.yaml", svc("web", "clusterIP: 10.0.0.1"))
				write(t, dir, "b.yaml", svc("cart", "clusterIP: 10.0.0.2"))
				s := newDirSource(dir, false, nil)
				if _, err := s.read(); err != nil {
					t.Fatal(err)
				}
				change(t, dir)
				if name != "removed" {
					s = newDirSource(dir, false, s.good)
				}
				since := time.Now()
				for n := 1; ; n++ {
					write(t, dir, "b.yaml", svc("cart", fmt.Sprintf("clusterIP: 10.0.0.%d", n)))
					r, err := s.read()
					if err != nil {
						t.Fatal(err)
					}
					if len(r.objects) == 1 {
						break
					}
					if !r.unsettled || r.kept != 0 || time.Since(since) > time.Minute {
						t.Fatalf("%d: %+v", n, r)
					}
					time.Sleep(900 * time.Millisecond) //nolint:forbidigo // advances the clock of the bubble
				}
				if got := time.Since(since); got < maxSettleTime || got > maxSettleTime+time.Second {
					t.Errorf("gone after %v", got)
				}
			})
		})
	}
}

// Directories that link to each other are read once each, not once for every path: 12
// directories have a billion paths.
func TestLinksToEachOther(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	const dirs = 12
	for i := range dirs {
		write(t, dir, fmt.Sprintf("%d/a.yaml", i), svc(fmt.Sprintf("web%d", i), "clusterIP: 10.0.0.1"))
		for j := range dirs {
			if err := os.Symlink(fmt.Sprintf("../%d", j), filepath.Join(dir, strconv.Itoa(i), "to"+strconv.Itoa(j))); err != nil {
				t.Fatal(err)
			}
		}
	}
	r, err := newDirSource(dir, false, nil).read()
	if err != nil || len(r.objects) != dirs || len(r.errs) != 0 {
		t.Errorf("%d objects, want %d; %v, %v", len(r.objects), dirs, r.errs, err)
	}
}

// A directory that is removed between being read and being watched is not an error, but a
// reason to read again.
func TestWatchOfRemovedDirectory(t *testing.T) {
	t.Parallel()
	w := newWatcher(defaultDebounce)
	defer w.close()
	again, err := w.sync(watchList{filepath.Join(t.TempDir(), "gone"): {all: true}})
	if !again || err != nil {
		t.Errorf("got %t, %v", again, err)
	}
}
