package files

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nametap/nametap/discovery/source"
	"github.com/nametap/nametap/internal/statedir"
	"github.com/nametap/nametap/internal/testkit/wait"
)

const debounce = 30 * time.Millisecond

// service returns a Service of namespace default.
func service(name, ip string) string {
	return fmt.Sprintf("---\napiVersion: v1\nkind: Service\nmetadata: {name: %s}\nspec: {clusterIP: %s}\n", name, ip)
}

// write writes a file as editors do: it renames a new file into place.
func write(t *testing.T, dir, name, content string) {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	tmp := filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".swp")
	if err := os.WriteFile(tmp, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(tmp, path); err != nil {
		t.Fatal(err)
	}
}

// overwrite writes a file in place.
func overwrite(t *testing.T, dir, name, content string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

func remove(t *testing.T, dir, name string) {
	t.Helper()
	if err := os.RemoveAll(filepath.Join(dir, name)); err != nil {
		t.Fatal(err)
	}
}

// A holder holds the objects of a source, as a control plane does.
type holder struct {
	*Source
	t       *testing.T
	last    source.Reading
	objects map[string]string // addresses by name
	told    int               // how often the source has told of a change
}

// hold returns a source that nothing runs: the test reads with look.
func hold(t *testing.T, dir string) *holder {
	t.Helper()
	return holdWith(t, dir, nil)
}

// holdWith is hold with a state directory.
func holdWith(t *testing.T, dir string, state *statedir.Dir) *holder {
	t.Helper()
	h := &holder{t: t, objects: map[string]string{}}
	var err error
	h.Source, err = New(Config{
		Dir: dir, State: state, Debounce: debounce, Changed: func() { h.told++ },
		Result: func(string, error) {}, Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// take takes what has changed.
func (h *holder) take() {
	h.last = h.Read()
	for _, c := range h.last.Changes {
		for _, o := range c.Updated {
			h.objects[o.Key.Name] = strings.Trim(fmt.Sprint(o.Service.ClusterIPs), "[]")
		}
		for _, key := range c.Removed {
			delete(h.objects, key.Name)
		}
	}
}

// look reads twice, as after a change.
func (h *holder) look() {
	h.step()
	time.Sleep(debounce) //nolint:forbidigo // advances the clock of the bubble
	h.step()
	h.take()
}

// want checks the objects and the errors.
func (h *holder) want(objects string, errs ...string) {
	h.t.Helper()
	if got := fmt.Sprint(h.objects); got != "map["+objects+"]" {
		h.t.Errorf("objects %s, want %s", got, objects)
	}
	var got []string
	for _, e := range h.last.Errors {
		got = append(got, e.Error())
	}
	if !slices.EqualFunc(got, errs, strings.HasPrefix) {
		h.t.Errorf("errors %q, want %q", got, errs)
	}
}

// TestFilesAreReplacedOneByOne checks that files that are removed and written again one after the other, as by git
// and scripts, remove no object, and that one that stays missing is removed.
func TestFilesAreReplacedOneByOne(t *testing.T) { // D43
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		write(t, dir, "a/web.yaml", service("web", "10.0.0.1"))
		write(t, dir, "a/cart.yaml", service("cart", "10.0.0.2"))
		write(t, dir, "other.yaml", service("other", "10.0.0.9"))
		h := hold(t, dir)
		h.look()
		const all = "cart:10.0.0.2 other:10.0.0.9 web:10.0.0.1"
		h.want(all)
		told := h.told
		remove(t, dir, "a")
		h.look()
		h.want(all)
		write(t, dir, "b/cart.yaml", service("cart", "10.0.0.2"))
		h.look()
		write(t, dir, "b/web.yaml", service("web", "10.0.0.1"))
		h.look()
		h.want(all)
		time.Sleep(settleTime) //nolint:forbidigo // advances the clock of the bubble
		h.look()
		h.want(all)
		if h.told != told {
			t.Error("files that were moved are a change")
		}
		remove(t, dir, "b/cart.yaml")
		h.look()
		h.want(all)
		time.Sleep(settleTime) //nolint:forbidigo // advances the clock of the bubble
		h.look()
		h.want("other:10.0.0.9 web:10.0.0.1")
	})
}

// TestMissingObjects checks that an object that is missing is removed after a second, however often
// other files change, even if it is missing when a process starts.
func TestMissingObjects(t *testing.T) { // D43
	t.Parallel()
	for name, restart := range map[string]bool{"removed": false, "half written at the start": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				dir := t.TempDir()
				write(t, dir, "a.yaml", service("web", "10.0.0.1"))
				write(t, dir, "b.yaml", service("cart", "10.0.0.2"))
				h := hold(t, dir)
				h.look()
				if restart {
					good := h.good
					overwrite(t, dir, "a.yaml", "# to be continued\n")
					h = hold(t, dir)
					h.outbox.Put(source.Reading{Changes: h.use(good)})
				} else {
					remove(t, dir, "a.yaml")
				}
				since := time.Now()
				for n := 1; ; n++ {
					write(t, dir, "b.yaml", service("cart", fmt.Sprintf("10.0.0.%d", n)))
					if h.look(); len(h.objects) == 1 {
						break
					}
					if time.Since(since) > time.Minute || h.last.Kept != 0 || len(h.last.Errors) != 0 {
						t.Fatalf("%+v", h.last)
					}
				}
				if took := time.Since(since); took < settleTime || took > settleTime+5*debounce {
					t.Errorf("gone after %v", took)
				}
			})
		})
	}
}

// TestSlowWriter checks that no object is removed while its file is written in place, as by a program whose output it
// is, however long that takes, but that one that is not written again is removed after 10 s.
func TestSlowWriter(t *testing.T) { // D18, D43
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const all = "s0:10.0.0.1 s1:10.0.0.1 s2:10.0.0.1 s3:10.0.0.1 s4:10.0.0.1"
		dir := t.TempDir()
		var services []string
		for n := range 5 {
			services = append(services, service("s"+strconv.Itoa(n), "10.0.0.1"))
		}
		text := strings.Join(services, "")
		overwrite(t, dir, "a.yaml", text)
		h := hold(t, dir)
		h.look()
		write := func(end int) {
			t.Helper()
			for written := 0; written < end; written += 47 {
				overwrite(t, dir, "a.yaml", text[:written])
				h.look()
				h.want(all, slices.Repeat([]string{"a.yaml"}, len(h.last.Errors))...)
				time.Sleep(500 * time.Millisecond) //nolint:forbidigo // advances the clock of the bubble
			}
		}
		write(len(text))
		overwrite(t, dir, "a.yaml", text)
		h.look()
		time.Sleep(time.Minute) //nolint:forbidigo // advances the clock of the bubble
		h.look()
		h.want(all)
		began := time.Now()
		for n := 0; len(h.objects) > 1; n++ {
			overwrite(t, dir, "a.yaml", service("s0", "10.0.0."+strconv.Itoa(n+1)))
			h.look()
			time.Sleep(500 * time.Millisecond) //nolint:forbidigo // advances the clock of the bubble
		}
		if took := time.Since(began); took < maxSettleTime || took > maxSettleTime+time.Second {
			t.Errorf("removed after %v", took)
		}
		for n := range 40 { // they go missing one after the other, at every second read
			if n%2 == 0 && n/2 < len(services) {
				overwrite(t, dir, "a.yaml", strings.Join(services[n/2:], ""))
			}
			time.Sleep(max(h.step(), debounce)) //nolint:forbidigo // advances the clock of the bubble
			h.take()
		}
		h.want("s4:10.0.0.1")
	})
}

// TestContentIsReadTwice checks that content that changes between two reads is not used, unless it changes all the
// time.
func TestContentIsReadTwice(t *testing.T) { // D18
	t.Parallel()
	dir := t.TempDir()
	write(t, dir, "a.yaml", service("web", "10.0.0.1"))
	h := hold(t, dir)
	h.step()
	h.take()
	h.want("")
	if h.last.Read {
		t.Errorf("one read is a reading: %+v", h.last)
	}
	h.step()
	h.take()
	h.want("web:10.0.0.1")
	overwrite(t, dir, "a.yaml", service("web", "10.0.0.1")[:40]+"...")
	h.step()
	overwrite(t, dir, "a.yaml", service("web", "10.0.0.12"))
	h.step()
	h.take()
	h.want("web:10.0.0.1")
	h.step()
	h.take()
	h.want("web:10.0.0.12")
	for n := range maxUnequal {
		h.want("web:10.0.0.12")
		overwrite(t, dir, "a.yaml", service("web", "10.0.1."+strconv.Itoa(n)))
		h.step()
		h.take()
	}
	h.want("web:10.0.1.9")
}

// TestSameStamp checks that two writes of one size are told apart even if the file system gives them one time.
func TestSameStamp(t *testing.T) { // D18
	t.Parallel()
	dir := t.TempDir()
	overwrite(t, dir, "a.yaml", service("web", "10.0.0.1"))
	last, err := readTree(dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	same := 0
	for n := range 100 {
		overwrite(t, dir, "a.yaml", service("web", "10.0.0."+strconv.Itoa(n%9+1)))
		next, err := readTree(dir, last)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(next.files["a.yaml"].data), "10.0.0."+strconv.Itoa(n%9+1)) {
			t.Fatalf("write %d was not seen", n)
		}
		if next.files["a.yaml"].stamp == last.files["a.yaml"].stamp {
			same++
		}
		last = next
	}
	t.Logf("%d of 100 writes had the time of the one before", same)
}

// TestEmptyAndUnreadable checks that the objects of a file or a directory that is empty, or cannot be read, stay in
// use, that the error says what to do, and that they end when it is removed.
func TestEmptyAndUnreadable(t *testing.T) { // D18, D43
	t.Parallel()
	loop := func(t *testing.T, path string) {
		t.Helper()
		// A link to itself cannot be opened, even by root, which can open files without permissions.
		if err := os.Symlink(path, path); err != nil {
			t.Fatal(err)
		}
	}
	const loops = ": cannot be read: too many levels of symbolic links"
	for name, tt := range map[string]struct {
		change func(t *testing.T, dir string)
		is     string // what is named in the error
		err    string
	}{
		"empty file":      {func(t *testing.T, dir string) { t.Helper(); overwrite(t, dir, "sub/b.yaml", "") }, "sub/b.yaml", ": is empty: write it again, or remove it"},
		"empty directory": {func(t *testing.T, dir string) { t.Helper(); remove(t, dir, "sub/b.yaml") }, "sub", ": is empty: mount it again or bring its files back, or remove it"},
		"unreadable file": {func(t *testing.T, dir string) {
			t.Helper()
			remove(t, dir, "sub/b.yaml")
			loop(t, filepath.Join(dir, "sub/b.yaml"))
		}, "sub/b.yaml", loops},
		"unreadable directory": {func(t *testing.T, dir string) { t.Helper(); remove(t, dir, "sub"); loop(t, filepath.Join(dir, "sub")) }, "sub", loops},
		"link without target": {func(t *testing.T, dir string) {
			t.Helper()
			remove(t, dir, "sub")
			if err := os.Symlink("nowhere", filepath.Join(dir, "sub")); err != nil {
				t.Fatal(err)
			}
		}, "sub", ": cannot be read: no such file"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				dir := t.TempDir()
				write(t, dir, "a.yaml", service("web", "10.0.0.1"))
				write(t, dir, "sub/b.yaml", service("cart", "10.0.0.2"))
				h := hold(t, dir)
				h.look()
				tt.change(t, dir)
				for range 2 {
					h.look()
					h.want("cart:10.0.0.2 web:10.0.0.1", tt.is+tt.err)
					if h.last.Kept != 1 || !h.last.Errors[0].Kept {
						t.Errorf("%+v", h.last)
					}
					time.Sleep(time.Hour) //nolint:forbidigo // advances the clock of the bubble
				}
				remove(t, dir, tt.is)
				h.look()
				if tt.is != "sub" { // now its directory is empty
					h.want("cart:10.0.0.2 web:10.0.0.1", "sub: is empty")
					return
				}
				h.want("cart:10.0.0.2 web:10.0.0.1")
				time.Sleep(settleTime) //nolint:forbidigo // advances the clock of the bubble
				h.look()
				h.want("web:10.0.0.1")
			})
		})
	}
}

// TestDirectoryGoesAway checks that all objects stay in use while the directory is missing, also after a restart, and
// that a damaged file of last good objects is not used.
func TestDirectoryGoesAway(t *testing.T) { // D18, D43
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		top := t.TempDir()
		dir, state := filepath.Join(top, "config"), filepath.Join(top, "state")
		write(t, dir, "a.yaml", service("web", "10.0.0.1"))
		write(t, dir, "sub/b.yaml", "# a comment first\n"+service("cart", "10.0.0.2"))
		h := holdWith(t, dir, statedir.New(state, "lock"))
		h.look()
		h.save()
		if err := os.Rename(dir, dir+".away"); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			h.look()
			h.want("cart:10.0.0.2 web:10.0.0.1", ".: cannot be read: no such file")
			if h.last.Kept != 2 || !h.last.Errors[0].Kept || h.last.Waiting != "" {
				t.Errorf("%+v", h.last)
			}
			h = holdWith(t, dir, statedir.New(state, "lock"))
		}
		// The directory comes back: a broken document stays in its last good form, and another file is gone.
		write(t, dir, "a.yaml", service("web", "broken"))
		h.look()
		time.Sleep(settleTime) //nolint:forbidigo // advances the clock of the bubble
		h.look()
		h.want("web:10.0.0.1", `a.yaml, document 1, Service default/web: spec.clusterIP: want an IP address, got "broken"`)

		saved := filepath.Join(state, objectsFile)
		data, err := os.ReadFile(saved)
		if err != nil {
			t.Fatal(err)
		}
		overwrite(t, state, objectsFile, strings.Replace(string(data), `"web"`, `"wob"`, 1))
		h = holdWith(t, dir, statedir.New(state, "lock"))
		h.look()
		h.want("", `a.yaml, document 1, Service default/web: spec.clusterIP: want an IP address, got "broken"`)
		if _, err := os.Stat(saved + ".damaged"); err != nil {
			t.Error(err)
		}
	})
}

// TestConfigMap checks that the links of a mounted ConfigMap, which Kubernetes replaces in one step, are followed, and a
// link to a parent directory is not followed forever.
func TestConfigMap(t *testing.T) { // D43
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		link := func(to, from string) {
			t.Helper()
			if err := os.Symlink(to, filepath.Join(dir, from)); err != nil {
				t.Fatal(err)
			}
		}
		put := func(version string) {
			t.Helper()
			write(t, dir, filepath.Join("..v"+version, "web.yaml"), service("web", "10.0.0."+version))
			write(t, dir, filepath.Join("..v"+version, "sub", "cart.yaml"), service("cart", "10.0.1."+version))
			link("..v"+version, "..new")
			if err := os.Rename(filepath.Join(dir, "..new"), filepath.Join(dir, "..data")); err != nil {
				t.Fatal(err)
			}
		}
		put("1")
		link("..data/web.yaml", "web.yaml")
		link("..data/sub", "sub")
		link(dir, "loop")
		h := hold(t, dir)
		h.look()
		h.want("cart:10.0.1.1 web:10.0.0.1")
		put("2")
		remove(t, dir, "..v1")
		h.look()
		h.want("cart:10.0.1.2 web:10.0.0.2")
	})
}

// TestLinksToEachOther checks that directories that link to each other are read once each, not once for every path:
// 12 directories have a billion paths.
func TestLinksToEachOther(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	const dirs = 12
	for i := range dirs {
		write(t, dir, fmt.Sprintf("%d/a.yaml", i), service(fmt.Sprintf("web%d", i), "10.0.0.1"))
		for j := range dirs {
			if err := os.Symlink(fmt.Sprintf("../%d", j), filepath.Join(dir, strconv.Itoa(i), "to"+strconv.Itoa(j))); err != nil {
				t.Fatal(err)
			}
		}
	}
	h := hold(t, dir)
	h.step()
	h.step()
	h.take()
	if len(h.objects) != dirs || len(h.last.Errors) != 0 {
		t.Errorf("%d objects, want %d; %v", len(h.objects), dirs, h.last.Errors)
	}
}

// TestRun checks that edits are seen while the source runs, that Run ends with its context, and saves what is in
// use.
func TestRun(t *testing.T) { // D18
	t.Parallel()
	dir := t.TempDir()
	write(t, dir, "a.yaml", service("web", "10.0.0.1"))
	h := hold(t, dir)
	changed := make(chan struct{}, 100)
	h.outbox.Changed = func() { changed <- struct{}{} }
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { h.Run(ctx) })
	for n := 1; n < 4; n++ {
		for h.objects["web"] != fmt.Sprintf("10.0.0.%d", n) {
			wait.For(t, "a change", changed)
			h.take()
		}
		write(t, dir, "a.yaml", service("web", fmt.Sprintf("10.0.0.%d", n+1)))
	}
	cancel()
	running.Wait()
}
