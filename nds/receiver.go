package nds

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"strings"
	"time"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"

	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/internal/clip"
	"github.com/nametap/nametap/internal/logonce"
	"github.com/nametap/nametap/internal/statedir"
)

// ApplyFunc replaces shards of the table. A shard has the hosts whose names have the same hash
// ([digest.ShardOf]). The parameter shards has all entries of each shard to replace, as a NameTable in wire form.
// Shards of the table that it does not have stay unchanged. If ApplyFunc returns an error, all shards must stay
// unchanged, and the push is rejected with that reason. Only one goroutine calls ApplyFunc. It may keep the
// entries, but must not change them.
type ApplyFunc func(shards map[int][]byte) error

// A receiver applies pushes and the snapshot. The goroutine of Client.Run owns it.
type receiver struct {
	cfg     Config
	apply   ApplyFunc
	metrics *metrics
	state   *state
	saver   *snapshotSaver
	dir     *statedir.Dir

	// table is the union of the resources that apply accepted last, from any stream or from the snapshot. loaded is
	// false before that.
	table      *table
	loaded     bool
	announced  map[string]string // the versions in the first request of the stream, by resource
	rejections logonce.Log       // logs why pushes were rejected
}

// restore applies the snapshot. If the snapshot is damaged or belongs to another node, restore renames the file: it is
// kept, but not used again.
func (r *receiver) restore() {
	if r.cfg.StateDir == "" {
		return
	}
	path := r.dir.File(snapshotName)
	data, err := os.ReadFile(path)
	lockErr := r.dir.Lock()
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return
	case err != nil:
		r.cfg.Logger.Warn("snapshot of the table not read", "error", err)
		return
	}
	s, err := parseSnapshot(data)
	if owner := snapshotOwner(r.cfg.Node); err == nil && s.owner != owner {
		err = fmt.Errorf("it belongs to %q, this node is %q", s.owner, owner)
	}
	var u update
	if err == nil {
		u, err = r.update(s.response)
	}
	if err == nil {
		err = r.apply(u.entries)
	}
	if err != nil {
		r.setAside(err, lockErr)
		return
	}
	r.table.use(u)
	r.loaded = true
	r.state.setTable(r.table, s.version, s.pushed, true)
	r.cfg.Logger.Info("using the table of the snapshot until the control plane sends one",
		"path", path, "version", s.version, "pushed", s.pushed)
}

// setAside renames a snapshot that cannot be used. reason says why. If lockErr is not nil, another process may own
// the snapshot, so setAside leaves it in place.
func (r *receiver) setAside(reason, lockErr error) {
	path, aside, err := r.dir.File(snapshotName), "", lockErr
	if err == nil {
		aside, err = r.dir.SetAside(snapshotName, "bad")
	}
	if err != nil {
		r.cfg.Logger.Warn("snapshot of the table not used", "path", path, "error", errors.Join(reason, err))
		return
	}
	r.cfg.Logger.Warn("snapshot of the table set aside", "path", path, "moved_to", aside, "error", reason)
}

// use applies a response. changed is true if the table differs from the previous one.
func (r *receiver) use(resp response) (changed bool, err error) {
	for _, m := range resp.resources {
		if err := checkHash(m); err != nil {
			return false, err
		}
	}
	u, err := r.update(resp)
	if err != nil {
		return false, err
	}
	result := resultUnchanged
	if len(u.entries) > 0 || !r.loaded {
		result = resultApplied
		start := time.Now()
		err := r.apply(u.entries)
		r.metrics.duration.Observe(time.Since(start).Seconds())
		if err != nil {
			return false, err
		}
		if u.hosts == 0 && r.table.hosts > 0 {
			r.cfg.Logger.Warn("the control plane sent no mesh hosts, the table is empty now", "version", clip.Text(resp.version, maxVersion))
		}
	}
	changed = len(u.resources) > 0 || !r.loaded
	r.table.use(u)
	r.loaded = true
	r.pushed(resp, result)
	return changed, nil
}

// update returns the update of the table by a response.
func (r *receiver) update(resp response) (update, error) {
	resources, err := r.parse(&resp)
	if err != nil {
		return update{}, err
	}
	whole, named := false, false
	for name, given := range resources {
		if given != nil && given != r.table.resources[name] { // no heartbeat
			whole, named = whole || name == "", named || name != ""
		}
	}
	if resp.all || resp.first || whole || r.table.whole() {
		for name := range r.table.resources {
			_, given := resources[name]
			_, announced := r.announced[name]
			if !given && (resp.all || whole || named && name == "" || resp.first && !announced) {
				resources[name] = nil
			}
		}
	}
	u := r.table.update(resources)
	if bytes := u.bytes + max(0, u.number-digest.Count)*resourceCost; bytes > r.cfg.MaxTable {
		return update{}, fmt.Errorf("the table would have %d bytes, and may have %d: let the workload see fewer hosts (Sidecar, exportTo), "+
			"or give the agent more memory (resources.limits.memory of the container, MemoryMax= of the unit)", bytes, r.cfg.MaxTable)
	}
	return u, nil
}

// resourceCost is how many bytes of [Config.MaxTable] a resource takes besides its entries, from the one after
// digest.Count on: istiod may send a resource for each host.
const resourceCost = 256

// snapshotEnd is the name of a resource in responses of istiod that have all resources.
const snapshotEnd = "istio.io/nds/full-snapshot"

// parse returns the resources that a response has, and nil for those that it removes. It sets resp.all if there is a
// resource that says so.
func (r *receiver) parse(resp *response) (resources map[string]*resource, err error) {
	if resp.typeURL != TypeURL {
		return nil, fmt.Errorf("response of type %q: want %q", resp.typeURL, TypeURL)
	}
	resources = make(map[string]*resource, len(resp.resources))
	for _, m := range resp.resources {
		name, body := m.GetName(), m.GetResource()
		_, twice := resources[name]
		switch {
		case twice:
			err = errors.New("it is in the response twice")
		case body == nil: // a heartbeat
			resources[name] = r.table.resources[name]
		case body.GetTypeUrl() != TypeURL:
			err = fmt.Errorf("type %q: want %q", body.GetTypeUrl(), TypeURL)
		case name == snapshotEnd:
			resp.all = true
		default:
			resources[name], err = newResource(name, m.GetVersion(), body.GetValue())
		}
		if err != nil {
			return nil, fmt.Errorf("resource %q (%d bytes): %w", name, len(body.GetValue()), err)
		}
	}
	for _, name := range resp.removed {
		resources[name] = nil
	}
	return resources, nil
}

// errHash is the error for a resource whose NameTable does not have the hash in its version.
var errHash = errors.New("it was damaged on the way")

// checkHash returns errHash if the version of a resource of nametap-discovery does not match its NameTable.
func checkHash(m *discoveryv3.Resource) error {
	if m.GetResource() == nil || !strings.HasPrefix(m.GetVersion(), digest.VersionPrefix) {
		return nil
	}
	if got := digest.VersionOf(digest.HashOf(m.GetResource().GetValue())); got != m.GetVersion() {
		return fmt.Errorf("resource %q has the hash %s, and its version is %s: %w", m.GetName(), got, m.GetVersion(), errHash)
	}
	return nil
}

// pushed counts and logs an accepted response, whose table is in use.
func (r *receiver) pushed(resp response, result string) {
	r.metrics.pushed(result, resp.bytes)
	r.rejections.Reset()
	log, version := r.cfg.Logger.Debug, clip.Text(resp.version, maxVersion)
	if r.state.setTable(r.table, version, time.Now(), false) {
		log = r.cfg.Logger.Info
	}
	log("table pushed", "version", version, "result", result, "hosts", r.table.hosts, "bytes", resp.bytes)
}

// reject counts and logs a rejected response.
func (r *receiver) reject(resp response, reason error) {
	r.metrics.pushed(resultRejected, resp.bytes)
	r.state.rejected(reason.Error())
	r.rejections.Report("push rejected, the current table stays", slog.LevelWarn, reason,
		"version", clip.Text(resp.version, maxVersion), "nonce", clip.Text(resp.nonce, maxVersion))
}

// save passes the table in use to the goroutine that writes the snapshot.
func (r *receiver) save(changed bool) {
	if r.cfg.StateDir == "" {
		return
	}
	state := r.state.read()
	r.saver.put(snapshot{
		owner: snapshotOwner(r.cfg.Node), version: state.Version, pushed: state.LastPush, shards: r.table.shards,
	}, changed)
}
