package lab

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

// cgroupPrefix begins the names of the cgroups of machines and nodes. The process ID of the test follows, so that a later
// test finds the cgroups that a killed test has left.
const cgroupPrefix = "nt-lab-"

// hierarchies returns where hierarchies of cgroups are mounted, and which of these is version 2; "" if none is.
func hierarchies() (all []string, unified string, err error) {
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return nil, "", fmt.Errorf("finding cgroups: %w", err)
	}
	for line := range strings.Lines(string(mounts)) {
		switch fields := strings.Fields(line); fields[2] {
		case "cgroup2":
			unified = fields[1]
			all = append(all, unified)
		case "cgroup":
			all = append(all, fields[1])
		}
	}
	if len(all) == 0 {
		return nil, "", errors.New("no cgroups are mounted: /proc/self/mounts has neither cgroup nor cgroup2")
	}
	return all, unified, nil
}

// own reports whether pid is this process.
func own(pid int) bool { return pid == os.Getpid() }

// ended reports whether the process pid has ended.
func ended(pid int) bool { return errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) }

// removeCgroups kills what is left in the cgroups of the processes that match, and removes them, in up to 10 s.
func removeCgroups(match func(pid int) bool) error {
	all, _, err := hierarchies()
	if err != nil {
		return err
	}
	var dirs []string
	for _, hierarchy := range all {
		found, err := filepath.Glob(filepath.Join(hierarchy, cgroupPrefix+"*"))
		if err != nil {
			return err
		}
		for _, dir := range found {
			number, _, _ := strings.Cut(strings.TrimPrefix(filepath.Base(dir), cgroupPrefix), "-")
			if pid, err := strconv.Atoi(number); err == nil && match(pid) {
				dirs = append(dirs, dir)
			}
		}
	}
	return removeAll(dirs)
}

// removeAll kills the processes in cgroups of version 2, and removes the cgroups, of any version, and all below them
// when their last process has ended.
func removeAll(dirs []string) error {
	for _, dir := range dirs {
		_ = os.WriteFile(filepath.Join(dir, "cgroup.kill"), []byte("1"), 0) // only version 2 has the file
	}
	deadline := time.Now().Add(10 * time.Second)
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
