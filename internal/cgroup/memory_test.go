package cgroup_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/nametap/nametap/internal/cgroup"
)

// The memory limit of a container or a unit is found in both versions of cgroups.
func TestMemoryLimit(t *testing.T) { // D33, E17
	const limitV1, limitV2 = "sys/fs/cgroup/memory/", "sys/fs/cgroup/"
	for name, tt := range map[string]struct {
		files map[string]string
		limit int64
	}{
		"a container, version 2":      {map[string]string{"proc/self/cgroup": "0::/\n", limitV2 + "memory.max": "268435456\n"}, 256 << 20},
		"a container without a limit": {map[string]string{"proc/self/cgroup": "0::/\n", limitV2 + "memory.max": "max\n"}, 0},
		"a unit in a slice": {map[string]string{
			"proc/self/cgroup": "0::/system.slice/nametap-discovery.service\n", limitV2 + "system.slice/nametap-discovery.service/memory.max": "max\n",
			limitV2 + "system.slice/memory.max": "1073741824\n",
		}, 1 << 30},
		"the lower one counts": {map[string]string{
			"proc/self/cgroup": "0::/a/b\n", limitV2 + "a/b/memory.max": "200\n", limitV2 + "a/memory.max": "100\n",
		}, 100},
		"a container, version 1": {map[string]string{
			"proc/self/cgroup": "5:cpu,cpuacct:/kubepods/pod1/c\n4:memory:/kubepods/pod1/c\n0::/\n", limitV1 + "memory.limit_in_bytes": "268435456\n",
		}, 256 << 20},
		"version 1 without a limit": {map[string]string{
			"proc/self/cgroup": "4:hugetlb,memory:/user\n", limitV1 + "user/memory.limit_in_bytes": "9223372036854771712\n", limitV1 + "memory.limit_in_bytes": "9223372036854771712\n",
		}, 0},
		"no cgroups": {nil, 0},
	} {
		root := t.TempDir()
		for path, text := range tt.files {
			path = filepath.Join(root, path)
			if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if limit := cgroup.MemoryLimit(root); limit != tt.limit {
			t.Errorf("%s: %d, want %d", name, limit, tt.limit)
		}
	}
}
