package main

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/spf13/pflag"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/guard"
	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/internal/condition"
	"github.com/nametap/nametap/internal/settings"
)

// isLive reports whether a running agent takes changed values of a setting. The changed values of all other settings
// take effect in the next process.
func isLive(name string) bool {
	return isOfDNS(name) || strings.HasPrefix(name, "capture-") ||
		slices.Contains([]string{"log-level", "query-log", "dnstap"}, name)
}

// isOfDNS reports whether [dnsproxy.Server.Configure] takes changed values of a setting.
func isOfDNS(name string) bool {
	group, _, _ := strings.Cut(name, "-")
	return slices.Contains([]string{"upstream", "cache"}, group) ||
		slices.Contains([]string{"serve-stale", "ttl", "before-sync", "bypass", "local-only"}, name)
}

// A configurable is an [agent.Agent].
type configurable interface {
	Configure(cfg dnsproxy.Config) error
	SetCapture(cfg agent.CaptureConfig) error
	SetRecords(cfg agent.RecordsConfig)
}

// A reloader reads the settings of a running agent again when a file has changed or a
// signal asks for it. It applies the changes that can be applied and logs all of them.
type reloader struct {
	running  *options         // the settings that the agent was started with
	last     *options         // the settings that were read last
	identity workloadIdentity // the identity that was read last
	failed   string           // the last error that was logged
	log      *slog.Logger
	watcher  settings.Watcher
	agent    func() configurable
	guard    *guard.Guard  // nil without --guard
	started  *guard.Policy // the policy that the agent was started with
	// inUse has the settings in use: for a setting that the agent takes while it runs, the value that was read last;
	// for any other setting, the value that the agent was started with.
	inUse atomic.Pointer[options]
	// files says whether changed files were refused, and which changes need a restart.
	files atomic.Pointer[fileSettings]
}

// fileSettings says which changes of the settings files, since the start of the agent, are not in use.
type fileSettings struct {
	refused string   // why the settings in the files cannot be used; "" if they can be
	pending []string // the names of changed settings that take effect after a restart
}

// conditions says what is wrong with the settings files, and with settings that the host does not fit.
func (r *reloader) conditions() []condition.Condition {
	files := r.files.Load()
	refused := condition.Condition{Code: "settings_refused", Title: "the settings in the files are in use"}
	if files.refused != "" {
		refused.Problems = []condition.Problem{{
			Severity: condition.Minor, What: "the settings files have changed, and cannot be used", Evidence: files.refused,
			Effect: "the agent uses the previous settings, and would not start again with these",
			Mend:   "correct that setting; nothing needs a restart", Rows: []string{"R10", "G12"},
		}}
	}
	pending := condition.Condition{Code: "settings_pending", Title: "no setting waits for a restart", Causes: []condition.Code{refused.Code}}
	if names := files.pending; len(names) > 0 {
		pending.Problems = []condition.Problem{pendingProblem(names, "the files with settings have other values than the agent had at its start")}
	}
	return slices.Concat(sourceConditions(r.running), r.policyConditions(), []condition.Condition{refused, pending})
}

// sourceConditions says whether this host has the addresses of --egress-source, if there are any.
func sourceConditions(o *options) []condition.Condition {
	if !o.carriesVIPs() || len(o.egress.Sources) == 0 {
		return nil
	}
	c := condition.Condition{Code: "egress_source", Title: "this host has the addresses of --egress-source"}
	if err := hasSources(o.egress.Sources); err != nil {
		c.Problems = []condition.Problem{{
			Severity: condition.Severe, What: "an address of --egress-source is on no interface of this host", Evidence: err.Error(),
			Effect: "connections to automatic VIPs are reset", Mend: "ip address show; correct --egress-source, and restart the agent",
			Rows: []string{"E15"},
		}}
	}
	return []condition.Condition{c}
}

// policyConditions says whether the rules of the kernel are those of the policy, if there is one and the agent does not
// install them.
func (r *reloader) policyConditions() []condition.Condition {
	if r.guard == nil || r.running.installRules {
		return nil
	}
	rules := condition.Condition{Code: "guard_pending", Title: "no change of the guard's policy waits for other rules of the kernel"}
	if p := r.guard.Policy(); p.Mode != r.started.Mode || !slices.Equal(p.Direct, r.started.Direct) {
		rules.Problems = []condition.Problem{{
			Severity: condition.Minor, What: "mode or direct of the guard's policy has changed since the agent started",
			Evidence: "the kernel's rules are those of an init step, which the agent cannot change",
			Effect:   "names follow the new policy; connections without a name follow the previous one",
			Mend:     "replace the pod; elsewhere, nametap capture apply", Rows: []string{"G12"},
		}}
	}
	return []condition.Condition{rules}
}

// pendingProblem returns the problem that settings wait for a restart.
func pendingProblem(names []string, evidence string) condition.Problem {
	return condition.Problem{
		Severity: condition.Minor, What: "settings have changed that take effect after a restart: " + strings.Join(names, ", "),
		Evidence: evidence, Effect: "the agent uses the previous values",
		Mend: "systemctl restart nametap; in a pod, replace the pod", Rows: []string{"R10"},
	}
}

// newReloader returns a reloader for an agent that was started with the settings o. The function current returns the
// agent.
func newReloader(o *options, log *slog.Logger, current func() configurable) *reloader {
	watched := settings.Files(o.flags)
	if o.guardFile != "" {
		watched = append(watched, o.guardFile)
	}
	id, _ := readIdentity(o.flags, os.Environ()) // there is no error, or the agent would not run
	r := &reloader{running: o, last: o, identity: id, log: log, watcher: settings.Watcher{Files: watched}, agent: current, started: o.policy}
	r.watcher.Note()
	r.inUse.Store(o)
	r.files.Store(&fileSettings{})
	return r
}

// showIn makes an agent show the settings in use.
func (r *reloader) showIn(cfg *agent.Config) {
	r.guard, cfg.Conditions = cfg.Guard, r.conditions
	cfg.Settings = func() map[string][]string { return r.values(func(string) bool { return true }) }
	cfg.DNSSettings = func() map[string][]string {
		return r.values(isOfDNS)
	}
}

// values returns those settings in use that were set, if the function wanted returns true for their names. It is safe
// for concurrent use.
func (r *reloader) values(wanted func(name string) bool) map[string][]string {
	return settings.Values(r.inUse.Load().flags, wanted)
}

// lookInterval is how often the files are looked at. A change counts at the second look, within a second.
const lookInterval = 500 * time.Millisecond

// run follows the files and the signals until ctx ends.
func (r *reloader) run(ctx context.Context, signals <-chan os.Signal) {
	changed, stop := clock.ForPolling(lookInterval).Poll(lookInterval, r.watcher.Changed)
	defer stop()
	if settings.CheckRereadable(r.running.flags) == nil {
		r.reload() // the files may have changed since the start
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-signals:
			r.log.Info("SIGHUP: reading the settings again")
			r.failed = "" // the result of each signal is logged
		}
		r.watcher.Note()
		r.reload()
	}
}

// reload reads the settings once. If a setting is wrong, the agent keeps the settings that it has.
func (r *reloader) reload() {
	policyErr := r.reloadPolicy()
	next, err := r.read()
	if err = errors.Join(policyErr, err); err != nil {
		r.files.Store(&fileSettings{refused: err.Error(), pending: r.files.Load().pending})
		if text := err.Error(); text != r.failed {
			r.failed = text
			r.log.Error("the settings stay unchanged", "error", err)
		}
		return
	}
	r.failed = ""
	for _, c := range changes(r.last, next.read) {
		switch {
		case isLive(c.name):
			r.log.Info("setting changed", "name", c.name, "from", c.from, "to", c.to)
		case c.to != r.running.flags.Lookup(c.name).Value.String():
			r.log.Warn("setting changed: it takes effect after a restart", "name", c.name, "from", c.from, "to", c.to)
		}
	}
	if id, err := readIdentity(next.read.flags, os.Environ()); err == nil && !reflect.DeepEqual(id, r.identity) {
		r.identity = id
		r.log.Warn("ISTIO_META variables changed: they take effect after a restart")
	}
	r.last = next.read
	r.files.Store(&fileSettings{pending: r.pending()})
	r.apply(next)
}

// reloadPolicy reads the policy of the guard. If it is wrong, the guard keeps the policy that it has.
func (r *reloader) reloadPolicy() error {
	if r.guard == nil {
		return nil
	}
	policy, err := readPolicyFile(r.running.guardFile)
	if err != nil || policy.Hash == r.guard.Policy().Hash {
		return err
	}
	r.log.Info("the policy of the guard changed", "file", policy.File, "mode", policy.Mode, "sha256", policy.Hash, "rules", len(policy.Rules))
	r.guard.Use(policy)
	return nil
}

// pending returns the settings whose new values take effect only after a restart.
func (r *reloader) pending() (names []string) {
	for _, c := range changes(r.running, r.last) {
		if !isLive(c.name) {
			names = append(names, "--"+c.name)
		}
	}
	return names
}

// apply makes the agent use the settings in the parameter next.
func (r *reloader) apply(next settingsRead) {
	previous := r.inUse.Swap(next.inUse)
	r.running.logLevel.Set(next.inUse.logLevel.Level())
	if slices.ContainsFunc(changes(previous, next.inUse), func(c settingChange) bool { return isOfDNS(c.name) }) {
		if err := r.agent().Configure(next.dns); err != nil {
			r.log.Error("the settings of DNS stay unchanged", "error", err)
		}
	}
	r.agent().SetRecords(next.inUse.agent.Records)
	if !r.running.installRules {
		return
	}
	if err := r.agent().SetCapture(next.capture); err != nil {
		r.log.Error("capture stays unchanged", "error", err)
	}
}

// A settingsRead has the settings that were read, and what follows from them for a running agent.
type settingsRead struct {
	read, inUse *options // as last and inUse of the reloader
	dns         dnsproxy.Config
	capture     agent.CaptureConfig // only if the agent installs rules
}

// read reads the settings of the files, with the command line and the environment that the agent was started with. It
// checks the settings that a running agent takes.
func (r *reloader) read() (next settingsRead, err error) {
	next.read = looseOptions()
	err = cmp.Or(settings.CheckRereadable(r.running.flags),
		settings.Copy(next.read.flags, r.running.flags, settings.Given))
	if err == nil {
		err = next.read.resolve()
	}
	if err != nil {
		return next, err
	}
	next.inUse = looseOptions()
	if err := cmp.Or(
		settings.Copy(next.inUse.flags, next.read.flags, func(flag *pflag.Flag) bool { return isLive(flag.Name) }),
		settings.Copy(next.inUse.flags, r.running.flags, func(flag *pflag.Flag) bool { return !isLive(flag.Name) }),
	); err != nil {
		return next, err
	}
	next.inUse.policy = r.inUse.Load().policy
	cfg := next.inUse.agent
	if err := next.inUse.completeDNS(&cfg); err != nil {
		return next, err
	}
	next.dns = cfg.DNS
	if err := next.dns.Validate(); err != nil || !r.running.installRules {
		return next, err
	}
	next.capture, err = next.inUse.agentCaptureConfig()
	return next, err
}

// A settingChange is one setting with its previous value and the value that was read now.
type settingChange struct{ name, from, to string }

// changes returns the settings that differ, in the order of the help.
func changes(previous, next *options) []settingChange {
	var found []settingChange
	next.flags.VisitAll(func(flag *pflag.Flag) {
		from, to := previous.flags.Lookup(flag.Name).Value.String(), flag.Value.String()
		if from != to {
			found = append(found, settingChange{flag.Name, from, to})
		}
	})
	return found
}
