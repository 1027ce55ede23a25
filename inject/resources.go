package inject

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// Resources are the requests and limits of each container that is added.
type Resources struct {
	Requests Amounts `yaml:"requests"`
	Limits   Amounts `yaml:"limits"`
}

// Amounts are quantities of cpu and memory, as Kubernetes writes them. An empty text stands for none.
type Amounts map[string]string

// leastMemory is the smallest limit with which an agent works. With a small table, an agent needs about 20 MiB.
const leastMemory = 32 << 20

// defaultResources returns the resources of an agent: with 1,000 hosts it uses 32 MiB. deploy/kubernetes/istiod.yaml
// explains the limit.
func defaultResources() Resources {
	return Resources{Amounts{"cpu": "10m", "memory": "32Mi"}, Amounts{"memory": "192Mi"}}
}

// withDefaults returns the resources with the defaults of amounts that are missing.
func (r Resources) withDefaults() Resources {
	defaults := defaultResources()
	for _, both := range [][2]Amounts{{defaults.Requests, r.Requests}, {defaults.Limits, r.Limits}} {
		maps.Copy(both[0], both[1])
	}
	return defaults
}

// list returns the amounts without the empty ones. The method check must have accepted them.
func (a Amounts) list() corev1.ResourceList {
	list := corev1.ResourceList{}
	for name, text := range a {
		if quantity, err := resource.ParseQuantity(text); err == nil {
			list[corev1.ResourceName(name)] = quantity
		}
	}
	return list
}

// check returns an error that names an amount that cannot be used.
func (r Resources) check() error {
	for field, amounts := range map[string]Amounts{"requests": r.Requests, "limits": r.Limits} {
		for _, name := range slices.Sorted(maps.Keys(amounts)) {
			if name != string(corev1.ResourceCPU) && name != string(corev1.ResourceMemory) {
				return fmt.Errorf("resources: %s: %.100q: want cpu or memory", field, name)
			}
			text := amounts[name]
			if quantity, err := resource.ParseQuantity(text); text != "" && (err != nil || quantity.Sign() <= 0) {
				return fmt.Errorf("resources: %s: %s: %.100q: want a quantity, such as 100m of cpu or 64Mi of memory", field, name, text)
			}
		}
	}
	limits := r.Limits.list()
	for name, request := range r.Requests.list() {
		if limit, ok := limits[name]; ok && request.Cmp(limit) > 0 {
			return fmt.Errorf("resources: %s: the request %s is above the limit %s: lower it, or raise the limit", name, request.String(), limit.String())
		}
	}
	if memory, ok := limits[corev1.ResourceMemory]; ok && memory.Value() < leastMemory {
		return errors.New("resources: limits: memory: want at least 32Mi, which the agent needs")
	}
	return nil
}

// requirements returns the resources of a container.
func (r Resources) requirements() corev1.ResourceRequirements {
	return corev1.ResourceRequirements{Requests: r.Requests.list(), Limits: r.Limits.list()}
}

// memory returns the parts of the memory limit, in MiB: for Go's runtime, or 0 without a limit; and for the files in the
// volume of the state, which are in memory, too: two snapshots of the largest table, which is a twelfth of the limit.
func (r Resources) memory() (runtime, files int64) {
	limit, ok := r.Limits.list()[corev1.ResourceMemory]
	if !ok {
		return 0, 32
	}
	whole := limit.Value() >> 20
	return whole * 3 / 4, whole / 5
}
