// Package cgroup finds and removes the control groups of the machines and nodes that tests run.
// The name of each begins with a prefix and the process ID of its test, so that a later test
// finds the control groups that a killed test has left.
package cgroup

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
	"time"
)

// A Hierarchy is a mounted hierarchy of cgroups.
type Hierarchy struct {
	Path    string
	Unified bool // version 2
}

// Hierarchies returns the mounted hierarchies. It fails if there are none.
func Hierarchies() ([]Hierarchy, error) {
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return nil, fmt.Errorf("finding cgroups: %w", err)
	}
	var all []Hierarchy
	for line := range strings.Lines(string(mounts)) {
		fields := strings.Fields(line)
		if kind := fields[2]; kind == "cgroup" || kind == "cgroup2" {
			all = append(all, Hierarchy{Path: fields[1], Unified: kind == "cgroup2"})
		}
	}
	if len(all) == 0 {
		return nil, errors.New("no cgroups are mounted: /proc/self/mounts has neither cgroup nor cgroup2")
	}
	return all, nil
}

// Own reports whether pid is this process.
func Own(pid int) bool { return pid == os.Getpid() }

// Ended reports whether the process pid has ended.
func Ended(pid int) bool { return errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) }

// Of returns the cgroups, in all hierarchies, whose names are prefix and a process ID that matches.
// After the process ID, the name may go on with "-" and any text.
func Of(prefix string, match func(pid int) bool) ([]string, error) {
	hierarchies, err := Hierarchies()
	if err != nil {
		return nil, err
	}
	var matching []string
	for _, h := range hierarchies {
		dirs, err := filepath.Glob(filepath.Join(h.Path, prefix+"*"))
		if err != nil {
			return nil, err
		}
		for _, dir := range dirs {
			number, _, _ := strings.Cut(strings.TrimPrefix(filepath.Base(dir), prefix), "-")
			if pid, err := strconv.Atoi(number); err == nil && match(pid) {
				matching = append(matching, dir)
			}
		}
	}
	return matching, nil
}

// Remove kills the processes in cgroups of version 2, and removes the cgroups and all
// cgroups below them when their last process has ended. It waits up to limit for that.
func Remove(limit time.Duration, dirs ...string) error {
	for _, dir := range dirs {
		_ = os.WriteFile(filepath.Join(dir, "cgroup.kill"), []byte("1"), 0) // only version 2 has the file
	}
	deadline := time.Now().Add(limit)
	for {
		var err error
		for _, dir := range dirs {
			err = errors.Join(err, removeEmpty(dir))
		}
		if err == nil || time.Now().After(deadline) {
			return err
		}
		time.Sleep(10 * time.Millisecond) // the kernel tells nothing when the last process has ended
	}
}

// removeEmpty removes a cgroup and all below it, which must have no process.
func removeEmpty(path string) error {
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
