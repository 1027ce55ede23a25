package node

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// cgroupPrefix begins the names of all nodes' cgroups; the process ID of the test follows.
const cgroupPrefix = "nt-node-"

// cgroups are the cgroups of a node: one in each hierarchy, in which kubelet makes those of
// pods.
type cgroups struct {
	name  string
	paths []string
}

// newCgroups makes the cgroups of a node, and removes those that a killed test has left.
func newCgroups(t *testing.T) cgroups {
	t.Helper()
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	c := cgroups{name: cgroupPrefix + strconv.Itoa(os.Getpid())}
	for line := range strings.Lines(string(mounts)) {
		fields := strings.Fields(line)
		if fields[2] != "cgroup" && fields[2] != "cgroup2" {
			continue
		}
		left, err := filepath.Glob(filepath.Join(fields[1], cgroupPrefix+"*"))
		if err != nil {
			t.Fatal(err)
		}
		for _, dir := range left {
			pid, err := strconv.Atoi(strings.TrimPrefix(filepath.Base(dir), cgroupPrefix))
			if err == nil && errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
				_ = removeCgroup(dir) // the test that is left may still be ending
			}
		}
		path := filepath.Join(fields[1], c.name)
		if err := os.Mkdir(path, 0o755); err != nil {
			t.Fatalf("making a cgroup for the node: %v", err)
		}
		c.paths = append(c.paths, path)
		// By default all pods together get as much of the processors as one process outside.
		for file, share := range map[string]string{"cpu.shares": "16384", "cpu.weight": "1600"} {
			_ = os.WriteFile(filepath.Join(path, file), []byte(share), 0) // only one hierarchy has one of the files
		}
	}
	if len(c.paths) == 0 {
		t.Fatal("no cgroups are mounted: /proc/self/mounts has neither cgroup nor cgroup2")
	}
	return c
}

// remove removes the cgroups, whose processes have been killed, in up to 10 s.
func (c cgroups) remove() error {
	deadline := time.Now().Add(10 * time.Second)
	for {
		var err error
		for _, path := range c.paths {
			err = errors.Join(err, removeCgroup(path))
		}
		if err == nil || time.Now().After(deadline) {
			return err
		}
		time.Sleep(10 * time.Millisecond) //nolint:forbidigo // the kernel tells nothing when the last process has ended
	}
}

// removeCgroup removes a cgroup and all below it.
func removeCgroup(path string) error {
	var dirs []string
	err := filepath.WalkDir(path, func(dir string, entry fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil // removed meanwhile
		case err != nil:
			return err
		case entry.IsDir():
			dirs = append(dirs, dir)
		}
		return nil
	})
	for _, dir := range slices.Backward(dirs) {
		if removeErr := os.Remove(dir); removeErr != nil && !errors.Is(removeErr, fs.ErrNotExist) {
			err = errors.Join(err, removeErr)
		}
	}
	return err
}

// memory returns the bytes that the cgroup of a container uses, and those that cannot be
// reclaimed: without pages of files.
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
