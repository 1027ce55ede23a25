package seen

import (
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/chans"
	"github.com/nametap/nametap/internal/clock"
)

const (
	// maxUnits bounds the names of cgroups that are kept.
	maxUnits = 4096
	// walkInterval is the least time between two walks over all cgroups.
	walkInterval = 250 * time.Millisecond
)

// units finds the names of cgroups. A cgroup is identified by a number, which is the inode of its directory. The
// names are kept, so that a record has the name of its cgroup even after the cgroup has ended.
type units struct {
	root   string        // the directory of cgroup v2; empty if there is none
	wanted chan struct{} // has an element when the method run should look for names

	mu     sync.Mutex
	paths  map[uint64]string // by number; the path is empty if no directory with this number was found
	walked time.Time         // when walkLocked was last called
}

// cgroupRoot returns the directory of cgroup v2, "" if there is none.
func cgroupRoot() string {
	for _, dir := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		var stat unix.Statfs_t
		if unix.Statfs(dir, &stat) == nil && stat.Type == unix.CGROUP2_SUPER_MAGIC {
			return dir
		}
	}
	return ""
}

func newUnits(root string) *units {
	return &units{root: root, wanted: make(chan struct{}, 1), paths: map[uint64]string{}}
}

// want makes the method run look for the name of a cgroup, if the name is not known.
func (u *units) want(id uint64) {
	if u.root == "" {
		return
	}
	if !u.mu.TryLock() {
		return // another goroutine is walking over all cgroups
	}
	_, known := u.paths[id]
	u.mu.Unlock()
	if known {
		return
	}
	chans.Wake(u.wanted)
}

// run walks over all cgroups when the name of a cgroup is wanted, until ctx ends.
func (u *units) run(ctx context.Context) {
	for {
		select {
		case <-u.wanted:
		case <-ctx.Done():
			return
		}
		u.mu.Lock()
		u.walkLocked()
		u.mu.Unlock()
		if !clock.Sleep(ctx, walkInterval) {
			return
		}
	}
}

// path returns the path of the cgroup that a client's socket was in at the time of q, such as
// /system.slice/gitea.service. It returns "" if the path is unknown. It may wait for walkInterval; queries do not wait
// for the lock.
func (u *units) path(q *Query) string {
	id := q.Who.Cgroup
	if u.root == "" || id == 0 {
		return ""
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	path, known := u.paths[id]
	if !known && !u.walked.After(q.Time) {
		time.Sleep(walkInterval - time.Since(u.walked))
		u.walkLocked()
		path = u.paths[id]
		u.paths[id] = path // if it is "", the cgroup has ended, or belongs to another namespace: it is not looked for again
	}
	return path
}

// walkLocked adds the paths of all cgroups that exist now.
func (u *units) walkLocked() {
	if len(u.paths) > maxUnits {
		clear(u.paths)
	}
	_ = filepath.WalkDir(u.root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.IsDir() {
			return nil //nolint:nilerr // a cgroup that has ended, or that this user may not read
		}
		var stat syscall.Stat_t
		if syscall.Lstat(path, &stat) == nil {
			u.paths[stat.Ino] = "/" + strings.TrimPrefix(strings.TrimPrefix(path, u.root), "/")
		}
		if len(u.paths) > 2*maxUnits {
			return fs.SkipAll
		}
		return nil
	})
	u.walked = time.Now()
}

var containerID = regexp.MustCompile(`[0-9a-f]{64}`)

// shortID is how many digits of a container's ID are shown. Tools such as docker show as many.
const shortID = 12

// UnitOf returns the systemd unit or the container in the path of a cgroup. It is the innermost part of the path
// that is a service, a scope or a container.
func UnitOf(path string) string {
	if path == "" || path == string(os.PathSeparator) {
		return ""
	}
	parts := strings.Split(path, "/")
	unit := parts[len(parts)-1]
	for i := len(parts) - 1; i > 0; i-- {
		if strings.HasSuffix(parts[i], ".service") || strings.HasSuffix(parts[i], ".scope") ||
			containerID.MatchString(parts[i]) {
			unit = parts[i]
			break
		}
	}
	if id := containerID.FindString(unit); id != "" {
		unit = strings.TrimSuffix(strings.Replace(unit, id, id[:shortID], 1), ".scope")
	}
	return unit
}

// isContainer reports whether the path of a cgroup has a container whose whole ID begins with id. It reports false if
// id has fewer than shortID digits.
func isContainer(path, id string) bool {
	return len(id) >= shortID && slices.ContainsFunc(containerID.FindAllString(path, -1),
		func(number string) bool { return strings.HasPrefix(number, id) })
}
