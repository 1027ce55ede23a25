package files_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nametap/nametap/discovery/files"
	"github.com/nametap/nametap/discovery/source"
)

// service returns a Service of namespace default.
func service(name, ip string) string {
	return fmt.Sprintf("---\napiVersion: v1\nkind: Service\nmetadata: {name: %s}\nspec: {clusterIP: %s}\n", name, ip)
}

// A tester runs a source in a bubble of testing/synctest, and holds the objects as a control plane does.
type tester struct {
	t       *testing.T
	dir     string
	source  *files.Source
	last    source.Reading
	objects map[string]string // addresses by name
	changes int               // readings that had changes
}

// follow runs the test in a bubble, in which a source follows a new directory with a file for each of the texts.
func follow(t *testing.T, texts map[string]string, test func(*tester)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		x := &tester{t: t, dir: filepath.Join(t.TempDir(), "config"), objects: map[string]string{}}
		if err := os.Mkdir(x.dir, 0o755); err != nil {
			t.Fatal(err)
		}
		for name, text := range texts {
			x.write(name, text)
		}
		var err error
		x.source, err = files.New(files.Config{Dir: x.dir, Debounce: 30 * time.Millisecond, Changed: func() {}, Result: func(error) {}})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			x.source.Run(ctx)
		}()
		defer func() {
			cancel()
			<-ended
		}()
		x.pass(100 * time.Millisecond)
		test(x)
	})
}

// pass lets time pass, and takes what has changed.
func (x *tester) pass(d time.Duration) {
	time.Sleep(d) //nolint:forbidigo // of the bubble's clock
	synctest.Wait()
	x.last = x.source.Read()
	if len(x.last.Changes) > 0 {
		x.changes++
	}
	for _, c := range x.last.Changes {
		for _, o := range c.Updated {
			x.objects[o.Key.Name] = strings.Trim(fmt.Sprint(o.Service.ClusterIPs), "[]")
		}
		for _, key := range c.Removed {
			delete(x.objects, key.Name)
		}
	}
}

// want checks the objects, and the beginnings of the errors, which have the file.
func (x *tester) want(objects string, errs ...string) {
	x.t.Helper()
	if got := fmt.Sprint(x.objects); got != "map["+objects+"]" {
		x.t.Errorf("objects %s, want %s", got, objects)
	}
	var got []string
	for _, e := range x.last.Errors {
		got = append(got, e.Error())
	}
	if !slices.EqualFunc(got, errs, strings.HasPrefix) {
		x.t.Errorf("errors %q, want %q", got, errs)
	}
}

// path returns the path of a file.
func (x *tester) path(name string) string { return filepath.Join(x.dir, name) }

// write writes a file as editors do: it renames a new file into place.
func (x *tester) write(name, text string) {
	x.t.Helper()
	path := x.path(name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		x.t.Fatal(err)
	}
	tmp := filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".swp")
	if err := os.WriteFile(tmp, []byte(text), 0o644); err != nil {
		x.t.Fatal(err)
	}
	if err := os.Rename(tmp, path); err != nil {
		x.t.Fatal(err)
	}
}

// overwrite writes a file in place.
func (x *tester) overwrite(name, text string) {
	x.t.Helper()
	if err := os.WriteFile(x.path(name), []byte(text), 0o644); err != nil {
		x.t.Fatal(err)
	}
}

func (x *tester) remove(name string) {
	x.t.Helper()
	if err := os.RemoveAll(x.path(name)); err != nil {
		x.t.Fatal(err)
	}
}

func (x *tester) link(to, name string) {
	x.t.Helper()
	if err := os.Symlink(to, x.path(name)); err != nil {
		x.t.Fatal(err)
	}
}

const (
	// edit is how long it takes until an edit is used.
	edit = 2 * time.Second
	// noFile is the beginning of an error.
	noFile = "cannot be read: no such file or directory"
)

// TestEdits checks that edits are used within two seconds: of several files, of the files that other files replace, and of
// an object that moves to another file. Files that editors make beside others are not read.
func TestEdits(t *testing.T) { // D43
	t.Parallel()
	follow(t, map[string]string{"a.yaml": service("web", "10.0.0.1") + service("cart", "10.0.0.2")}, func(x *tester) {
		x.want("cart:10.0.0.2 web:10.0.0.1")
		x.write("a.yaml", service("web", "10.0.0.1"))
		x.write("b.json", `{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "cart"}, "spec": {"clusterIP": "10.0.0.3"}}`)
		x.write("a.yaml~", service("old", "10.0.0.1"))
		x.write(".a.yaml", service("old", "10.0.0.1"))
		x.pass(edit)
		x.want("cart:10.0.0.3 web:10.0.0.1")
		x.write("c.yml", service("web", "10.0.0.9"))
		x.pass(edit)
		x.want("cart:10.0.0.3 web:10.0.0.1", "c.yml")
		x.remove("a.yaml")
		x.pass(edit)
		x.want("cart:10.0.0.3 web:10.0.0.9")
	})
}

// TestFilesAreReplacedOneByOne checks that files that are removed and written again one after the other, as by git and
// scripts, remove no object.
func TestFilesAreReplacedOneByOne(t *testing.T) { // D43
	t.Parallel()
	follow(t, map[string]string{"a/web.yaml": service("web", "10.0.0.1"), "a/cart.yaml": service("cart", "10.0.0.2")}, func(x *tester) {
		before := x.changes
		const pause = 900 * time.Millisecond
		x.remove("a")
		x.pass(pause)
		x.write("b/cart.yaml", service("cart", "10.0.0.2"))
		x.pass(pause)
		x.write("b/web.yaml", service("web", "10.0.0.1"))
		for range 10 {
			x.pass(pause)
		}
		x.want("cart:10.0.0.2 web:10.0.0.1")
		if x.changes != before {
			t.Error("files that were moved are a change")
		}
	})
}

// TestObjectsGo checks that objects that go one after the other are all removed.
func TestObjectsGo(t *testing.T) { // D43
	t.Parallel()
	all := []string{service("a", "10.0.0.1"), service("b", "10.0.0.1"), service("c", "10.0.0.1"), service("d", "10.0.0.1")}
	follow(t, map[string]string{"all.yaml": strings.Join(all, "")}, func(x *tester) {
		for len(all) > 1 {
			all = all[1:]
			x.overwrite("all.yaml", strings.Join(all, ""))
			x.pass(600 * time.Millisecond)
		}
		x.pass(edit)
		x.want("d:10.0.0.1")
	})
}

// TestSlowWriter checks that a file is not used while it is written, as by a program whose output it is, and that other
// files are used if that takes long.
func TestSlowWriter(t *testing.T) { // D18, D43
	t.Parallel()
	var all []string
	for n := range 20 {
		all = append(all, service("s"+strconv.Itoa(n), "10.0.0.1"))
	}
	text := strings.Join(all, "")
	follow(t, map[string]string{"slow.yaml": text, "other.yaml": service("other", "10.0.0.1")}, func(x *tester) {
		slow := len(x.objects)
		x.write("other.yaml", service("other", "10.0.0.22"))
		for written := 0; written < len(text); written += 47 {
			x.overwrite("slow.yaml", text[:written])
			x.pass(500 * time.Millisecond)
			if len(x.objects) != slow {
				t.Fatalf("%d bytes are written, and the objects are %v", written, x.objects)
			}
		}
		if x.objects["other"] != "10.0.0.22" || len(x.last.Errors) != 1 || x.last.Errors[0].Msg != "cannot be read: it is being written" {
			t.Errorf("objects %v, errors %v", x.objects, x.last.Errors)
		}
		x.overwrite("slow.yaml", text+service("more", "10.0.0.1"))
		x.pass(edit)
		if len(x.objects) != slow+1 || len(x.last.Errors) != 0 {
			t.Errorf("objects %v, errors %v", x.objects, x.last.Errors)
		}
	})
}

// TestBrokenFile checks that a file stays in use as it was, in all of its objects, while it has an error or no object, and
// that what is right of a file is used if no good content was seen.
func TestBrokenFile(t *testing.T) { // D18, D43
	t.Parallel()
	good := service("web", "10.0.0.1") + service("cart", "10.0.0.2")
	follow(t, map[string]string{"a.yaml": good, "new.yaml": service("new", "10.0.0.1") + service("typo", "ten")}, func(x *tester) {
		const typo = "new.yaml"
		x.want("cart:10.0.0.2 new:10.0.0.1 web:10.0.0.1", typo)
		for text, why := range map[string]string{
			service("web", "10.0.0.7") + service("more", "10.0"): "a.yaml",
			service("web", "10.0.0.7") + "---\nkind: {":          "a.yaml",
			"# to be continued\n":                                "a.yaml: holds no object any more: write it again, or remove it",
			"":                                                   "a.yaml: holds no object any more",
		} {
			x.overwrite("a.yaml", text)
			x.pass(edit)
			x.want("cart:10.0.0.2 new:10.0.0.1 web:10.0.0.1", why, typo)
			if x.last.Kept != 2 || !x.last.Errors[0].Kept || x.last.Errors[1].Kept {
				t.Errorf("%+v", x.last)
			}
		}
		x.write("new.yaml", service("new", "10.0.0.3"))
		x.overwrite("a.yaml", service("web", "10.0.0.77"))
		x.pass(edit)
		x.want("new:10.0.0.3 web:10.0.0.77")
		x.remove("a.yaml")
		x.pass(edit)
		x.want("new:10.0.0.3")
	})
}

// TestUnreadable checks that the objects of what cannot be read stay in use, that the error says what it is, and that they
// end when it is removed.
func TestUnreadable(t *testing.T) { // D18, D43
	t.Parallel()
	// A link to itself cannot be opened, even by root, which can open files without permissions.
	const loops = ": cannot be read: too many levels of symbolic links"
	for name, tt := range map[string]struct {
		change   func(x *tester)
		is, text string
	}{
		"file": {func(x *tester) {
			x.remove("sub/b.yaml")
			x.link("b.yaml", "sub/b.yaml")
		}, "sub/b.yaml", loops},
		"directory": {func(x *tester) {
			x.remove("sub")
			x.link("sub", "sub")
		}, "sub", loops},
		"link without target": {func(x *tester) {
			x.remove("sub")
			x.link("nowhere", "sub")
		}, "sub", ": " + noFile},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			follow(t, map[string]string{"a.yaml": service("web", "10.0.0.1"), "sub/b.yaml": service("cart", "10.0.0.2")}, func(x *tester) {
				tt.change(x)
				for range 2 {
					x.pass(time.Hour)
					x.want("cart:10.0.0.2 web:10.0.0.1", tt.is+tt.text)
					if x.last.Kept != 1 || !x.last.Errors[0].Kept {
						t.Errorf("%+v", x.last)
					}
				}
				x.remove(tt.is)
				x.pass(edit)
				x.want("web:10.0.0.1")
			})
		})
	}
}

// TestDirectoryGoesAway checks that all objects stay in use while the directory is missing or empty.
func TestDirectoryGoesAway(t *testing.T) { // D18, D43
	t.Parallel()
	follow(t, map[string]string{"a.yaml": service("web", "10.0.0.1"), "sub/b.yaml": service("cart", "10.0.0.2")}, func(x *tester) {
		for what, away := range map[string]func(){
			".: " + noFile: func() {
				if err := os.Rename(x.dir, x.dir+".away"); err != nil {
					t.Fatal(err)
				}
			},
			".: holds no object any more: bring the files back": func() {
				x.remove("a.yaml")
				x.remove("sub")
				x.write("README.md", "")
			},
		} {
			away()
			x.pass(time.Minute)
			x.want("cart:10.0.0.2 web:10.0.0.1", what)
			if x.last.Kept != 2 || !x.last.Errors[0].Kept || x.last.Waiting != "" {
				t.Errorf("%+v", x.last)
			}
			x.write("a.yaml", service("web", "10.0.0.1"))
			x.write("sub/b.yaml", service("cart", "10.0.0.2"))
			x.pass(edit)
			x.want("cart:10.0.0.2 web:10.0.0.1")
		}
	})
}

// TestConfigMap checks that the links of a mounted ConfigMap, which Kubernetes replaces in one step, are followed, and a
// link to a parent directory is not followed forever.
func TestConfigMap(t *testing.T) { // D43
	t.Parallel()
	follow(t, nil, func(x *tester) {
		put := func(version string) {
			x.write("..v"+version+"/web.yaml", service("web", "10.0.0."+version))
			x.write("..v"+version+"/sub/cart.yaml", service("cart", "10.0.1."+version))
			x.link("..v"+version, "..new")
			if err := os.Rename(x.path("..new"), x.path("..data")); err != nil {
				t.Fatal(err)
			}
		}
		put("1")
		x.link("..data/web.yaml", "web.yaml")
		x.link("..data/sub", "sub")
		x.link(x.dir, "loop")
		x.pass(edit)
		x.want("cart:10.0.1.1 web:10.0.0.1")
		put("2")
		x.remove("..v1")
		x.pass(edit)
		x.want("cart:10.0.1.2 web:10.0.0.2")
	})
}

// TestLinksToEachOther checks that directories that link to each other are read once each, not once for every path:
// 12 directories have a billion paths.
func TestLinksToEachOther(t *testing.T) {
	t.Parallel()
	follow(t, nil, func(x *tester) {
		const dirs = 12
		for i := range dirs {
			x.write(fmt.Sprintf("%d/a.yaml", i), service(fmt.Sprintf("web%d", i), "10.0.0.1"))
			for j := range dirs {
				x.link(fmt.Sprintf("../%d", j), fmt.Sprintf("%d/to%d", i, j))
			}
		}
		x.pass(edit)
		if len(x.objects) != dirs || len(x.last.Errors) != 0 {
			t.Errorf("%d objects, want %d; %v", len(x.objects), dirs, x.last.Errors)
		}
	})
}
