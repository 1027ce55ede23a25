package lab

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

// ProcessorTime returns the user and system time of a process and its children since their
// start. It reads the clock of the process, in nanoseconds, instead of utime and stime in
// /proc/PID/stat, because a run at a low rate lasts only a few of their ticks of 10 ms.
func ProcessorTime(pid int) (time.Duration, error) {
	pids, err := family(pid)
	if err != nil {
		return 0, err
	}
	var sum time.Duration
	for _, pid := range pids {
		used, err := ProcessorClock(ClockOf(pid))
		if err != nil {
			return 0, fmt.Errorf("process %d: %w", pid, err)
		}
		sum += used
	}
	return sum, nil
}

// ClockOf returns the clock of a process without its children: CPUCLOCK_SCHED of another
// process, as clock_getcpuclockid(3) makes it.
func ClockOf(pid int) int32 { return int32(^pid<<3 | 2) } // a pid has 22 bits

// ProcessorClock reads a clock that runs while a process or a thread runs.
func ProcessorClock(clock int32) (time.Duration, error) {
	var t unix.Timespec
	if err := unix.ClockGettime(clock, &t); err != nil {
		return 0, fmt.Errorf("reading a processor clock: %w", err)
	}
	return time.Duration(t.Nano()), nil
}

// Memory returns the resident memory of a process and its children in bytes. A page that
// several processes share is divided among them.
func Memory(pid int) (int, error) {
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
		// For a single process, shared pages count fully.
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

// family returns pid and all its descendants.
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

// parseStat reads the numbers of the process and its parent from /proc/PID/stat. The
// command's name before them is in parentheses and may have any characters.
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
