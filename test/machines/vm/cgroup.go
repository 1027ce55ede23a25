package vm

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

// cgroupPrefix begins the names of the machines' cgroups. The number of the test's process
// follows.
const cgroupPrefix = "nt-vm-"

// cgroups returns where the hierarchies of cgroups are mounted: version 2, and all.
func cgroups() (unified string, all []string, err error) {
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return "", nil, fmt.Errorf("finding cgroups: %w", err)
	}
	for line := range strings.Lines(string(mounts)) {
		fields := strings.Fields(line)
		switch fields[2] {
		case "cgroup2":
			unified = fields[1]
			all = append(all, fields[1])
		case "cgroup":
			all = append(all, fields[1])
		}
	}
	if unified == "" {
		return "", nil, errors.New("needs cgroups of version 2, run: mkdir -p /sys/fs/cgroup/unified && mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified")
	}
	return unified, all, nil
}

// newCgroup makes a cgroup for one machine. Two machines in one cgroup would use the same
// cgroup for the same unit.
func newCgroup() (string, error) {
	unified, _, err := cgroups()
	if err != nil {
		return "", err
	}
	return os.MkdirTemp(unified, fmt.Sprintf("%s%d-", cgroupPrefix, os.Getpid()))
}

// own reports whether pid is this process.
func own(pid int) bool { return pid == os.Getpid() }

// dead reports whether pid has ended.
func dead(pid int) bool { return errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) }

// removeCgroups ends the machines of the processes that match, and removes their cgroups.
func removeCgroups(match func(pid int) bool) {
	_, hierarchies, err := cgroups()
	if err != nil {
		return // no machine was booted
	}
	var matching []string
	for _, hierarchy := range hierarchies {
		dirs, _ := filepath.Glob(filepath.Join(hierarchy, cgroupPrefix+"*")) // the pattern is well-formed
		for _, dir := range dirs {
			number, _, _ := strings.Cut(strings.TrimPrefix(filepath.Base(dir), cgroupPrefix), "-")
			if pid, err := strconv.Atoi(number); err == nil && match(pid) {
				matching = append(matching, dir)
			}
		}
	}
	for _, dir := range matching {
		_ = os.WriteFile(filepath.Join(dir, "cgroup.kill"), []byte("1"), 0) // only version 2 has the file
	}
	for _, dir := range matching {
		removeCgroup(dir)
	}
}

// removeCgroup removes a cgroup with those below it when their last process has ended. It waits
// up to 5 s for that.
func removeCgroup(dir string) {
	for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		var dirs []string
		err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
			if err == nil && entry.IsDir() {
				dirs = append(dirs, path)
			}
			return nil
		})
		for _, dir := range slices.Backward(dirs) {
			err = errors.Join(err, syscall.Rmdir(dir))
		}
		if err == nil {
			return
		}
	}
}
