package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// processorTime is what a process and its children have used since they started,
// user and system. It is the sum that /proc/PID/stat shows as utime and stime, in
// ticks of 10 ms, but read from the clock of the process, in nanoseconds: a run at
// a low rate is a few ticks long.
func processorTime(pid int) (time.Duration, error) {
	pids, err := family(pid)
	if err != nil {
		return 0, err
	}
	var sum time.Duration
	for _, pid := range pids {
		used, err := processorClock(clockOf(pid))
		if err != nil {
			return 0, fmt.Errorf("process %d: %w", pid, err)
		}
		sum += used
	}
	return sum, nil
}

// clockOf is the clock of a process without its children: CPUCLOCK_SCHED of another
// process, as clock_getcpuclockid(3) makes it.
func clockOf(pid int) int32 { return int32(^pid<<3 | 2) } // a pid has 22 bits

// processorClock reads a clock that runs while a process or a thread does.
func processorClock(clock int32) (time.Duration, error) {
	var t unix.Timespec
	if err := unix.ClockGettime(clock, &t); err != nil {
		return 0, fmt.Errorf("reading a processor clock: %w", err)
	}
	return time.Duration(t.Nano()), nil
}

// memory is what a process and its children hold in memory, in bytes: pages that
// several share are counted once, by their shares.
func memory(pid int) (int, error) {
	pids, err := family(pid)
	if err != nil {
		return 0, err
	}
	sum := 0
	for _, pid := range pids {
		text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "smaps_rollup"))
		if err != nil {
			return 0, fmt.Errorf("reading the memory of process %d: %w", pid, err)
		}
		// Alone, all it has is its own, even what it shares with strangers.
		field := "Rss"
		if len(pids) > 1 {
			field = "Pss"
		}
		size, err := parseSize(string(text), field)
		if err != nil {
			return 0, err
		}
		sum += size
	}
	return sum, nil
}

// peakMemory is the most that a process alone has held in memory so far, in bytes.
func peakMemory(pid int) (int, error) {
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "status"))
	if err != nil {
		return 0, fmt.Errorf("reading the memory of process %d: %w", pid, err)
	}
	return parseSize(string(text), "VmHWM")
}

// family is pid and all processes below it.
func family(pid int) ([]int, error) {
	files, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return nil, fmt.Errorf("listing processes: %w", err)
	}
	children := map[int][]int{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
			continue // ended meanwhile
		}
		if err != nil {
			return nil, fmt.Errorf("listing processes: %w", err)
		}
		child, parent, err := parseStat(string(text))
		if err != nil {
			return nil, err
		}
		children[parent] = append(children[parent], child)
	}
	all := []int{pid}
	for i := 0; i < len(all); i++ {
		all = append(all, children[all[i]]...)
	}
	return all, nil
}

// parseStat reads the process and its parent from /proc/PID/stat. The name of the
// command stands in parentheses before them and may hold anything.
func parseStat(text string) (pid, parent int, err error) {
	first, rest, ok := strings.Cut(text, " (")
	end := strings.LastIndex(rest, ") ")
	if !ok || end < 0 {
		return 0, 0, fmt.Errorf("parsing stat %q: no command", text)
	}
	fields := strings.Fields(rest[end+2:])
	if len(fields) < 2 {
		return 0, 0, fmt.Errorf("parsing stat %q: too short", text)
	}
	if pid, err = strconv.Atoi(first); err != nil {
		return 0, 0, fmt.Errorf("parsing stat %q: %w", text, err)
	}
	if parent, err = strconv.Atoi(fields[1]); err != nil {
		return 0, 0, fmt.Errorf("parsing stat %q: %w", text, err)
	}
	return pid, parent, nil
}

// parseSize reads a field of /proc/PID/smaps_rollup or /proc/PID/status, in bytes.
func parseSize(text, field string) (int, error) {
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) == 3 && fields[0] == field+":" && fields[2] == "kB" {
			size, err := strconv.Atoi(fields[1])
			if err != nil {
				return 0, fmt.Errorf("parsing field %q: %w", field, err)
			}
			return size << 10, nil
		}
	}
	return 0, fmt.Errorf("no field %q", field)
}
