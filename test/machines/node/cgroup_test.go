package node

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/test/machines/cgroup"
)

// cgroupPrefix begins the names of all nodes' cgroups; the process ID of the test follows.
const cgroupPrefix = "nt-node-"

// cgroups are the cgroups of a node: one in each hierarchy, in which kubelet makes the
// pods' cgroups.
type cgroups struct {
	name  string
	paths []string
}

// newCgroups makes the cgroups of a node, and removes cgroups that a killed test has left.
func newCgroups(t *testing.T) cgroups {
	t.Helper()
	left, err := cgroup.Of(cgroupPrefix, cgroup.Ended)
	if err != nil {
		t.Fatal(err)
	}
	_ = cgroup.Remove(0, left...) // the test that has left them may still be ending
	hierarchies, err := cgroup.Hierarchies()
	if err != nil {
		t.Fatal(err)
	}
	c := cgroups{name: cgroupPrefix + strconv.Itoa(os.Getpid())}
	for _, h := range hierarchies {
		path := filepath.Join(h.Path, c.name)
		if err := os.Mkdir(path, 0o755); err != nil {
			t.Fatalf("making a cgroup for the node: %v", err)
		}
		c.paths = append(c.paths, path)
		// By default all pods together get as much of the processors as one process outside.
		for file, share := range map[string]string{"cpu.shares": "16384", "cpu.weight": "1600"} {
			_ = os.WriteFile(filepath.Join(path, file), []byte(share), 0) // only one hierarchy has one of the files
		}
	}
	return c
}

// remove kills what is left in the cgroups, and removes them, in up to 10 s.
func (c cgroups) remove() error { return cgroup.Remove(10*time.Second, c.paths...) }

// memory returns how many bytes the cgroup of a container uses, and how many of them
// cannot be reclaimed: all but pages of files.
func (c cgroups) memory(t *testing.T, container string) (all, anonymous int64) {
	t.Helper()
	for _, root := range c.paths {
		var dir string
		_ = filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
			if err == nil && filepath.Base(path) == container {
				dir = path
			}
			return nil
		})
		for usage, anon := range map[string]string{"memory.usage_in_bytes": "total_rss", "memory.current": "anon"} {
			text, err := os.ReadFile(filepath.Join(dir, usage))
			if dir == "" || err != nil {
				continue
			}
			stat, err := os.ReadFile(filepath.Join(dir, "memory.stat"))
			if err != nil {
				t.Fatal(err)
			}
			for line := range strings.Lines(string(stat)) {
				if value, found := strings.CutPrefix(line, anon+" "); found {
					return number(t, string(text)), number(t, value)
				}
			}
		}
	}
	t.Fatalf("no memory cgroup of the container %s", container)
	return 0, 0
}

func number(t *testing.T, text string) int64 {
	t.Helper()
	n, err := strconv.ParseInt(strings.TrimSpace(text), 10, 64)
	if err != nil {
		t.Fatal(fmt.Errorf("a cgroup's file: %w", err))
	}
	return n
}
