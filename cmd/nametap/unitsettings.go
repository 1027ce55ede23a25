package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/nametap/nametap/internal/settings"
)

const (
	unitName = "nametap.service"
	// unitTimeout is how long systemd may take to answer.
	unitTimeout = 2 * time.Second
)

// unitSettings are the settings of nametap.service.
type unitSettings struct {
	environ []string // a later variable wins
	files   []string // the files that were read
	err     error    // why a file could not be read
	pid     int      // the process of the unit; 0 if it does not run, or there is no systemd
}

// name names the settings of the unit.
func (u unitSettings) name() string {
	return "a setting of " + unitName + " (" + strings.Join(u.files, ", ") + ")"
}

// options returns the settings that an agent with the unit's environment would have, and an error if they are wrong.
func (u unitSettings) options() (*options, error) { return optionsOf(u.environ) }

// running returns the settings that the environment of the unit's process gives.
func (u unitSettings) running() (*options, error) {
	text, err := os.ReadFile("/proc/" + strconv.Itoa(u.pid) + "/environ")
	if err != nil {
		return nil, err
	}
	o, _ := optionsOf(strings.Split(string(text), "\x00")) // the process runs with them
	return o, nil
}

// optionsOf returns the settings of an environment, and an error if they are wrong.
func optionsOf(environ []string) (*options, error) {
	o := looseOptions()
	o.checkOnly = true
	err := settings.Resolve(o.flags, environ)
	if err == nil {
		_, err = o.config()
	}
	return o, err
}

// describe returns the end of a text about where settings come from. The text says why they do not come from the
// running agent. unasked is the error of asking that agent.
func (u unitSettings) describe(unasked error) string {
	why := "no agent answers"
	if !errors.Is(unasked, errNoAgent) || errors.Is(unasked, fs.ErrPermission) {
		why = fmt.Sprintf("the running agent cannot be asked: %v", unasked)
	}
	text := ", then " + strings.Join(u.files, ", ") + " (" + why + ")"
	if len(u.files) == 0 {
		text = ": " + why + ", and " + unitName + " has no file with settings"
	}
	if u.err != nil {
		text += fmt.Sprintf("; without a file that this user cannot read, so run this as root: %v", u.err)
	}
	return text
}

// showUnit returns properties of nametap.service as `systemctl show` prints them; "" without systemd or the unit.
func showUnit(ctx context.Context, properties string) string {
	ctx, cancel := context.WithTimeout(ctx, unitTimeout)
	defer cancel()
	show := exec.CommandContext(ctx, "systemctl", "show", "--property=LoadState,"+properties, unitName) //nolint:gosec // constants
	out, err := show.Output()
	if err != nil || !strings.Contains("\n"+string(out), "\nLoadState=loaded\n") {
		return ""
	}
	return string(out)
}

// property returns a property that `systemctl show` has printed.
func property(text, name string) string {
	_, value, _ := strings.Cut("\n"+text, "\n"+name+"=")
	value, _, _ = strings.Cut(value, "\n")
	return value
}

// readUnit returns the settings of nametap.service, including the settings of drop-ins.
func readUnit(ctx context.Context) (unit unitSettings) {
	files := []string{"/var/lib/istio/envoy/cluster.env", "/etc/default/nametap"} // if systemd cannot be asked
	if text := showUnit(ctx, "Environment,EnvironmentFiles,MainPID"); text != "" {
		unit.environ, files = settings.ParseEnvironment(property(text, "Environment")), nil
		for line := range strings.Lines(text) {
			if file, found := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "EnvironmentFiles="); found {
				file, _, _ = strings.Cut(file, " (ignore_errors=")
				files = append(files, file)
			}
		}
		unit.pid, _ = strconv.Atoi(property(text, "MainPID"))
	}
	for _, pattern := range files {
		found, err := filepath.Glob(pattern)
		if err != nil || len(found) == 0 {
			found = []string{pattern}
		}
		for _, file := range found {
			text, err := os.ReadFile(file)
			switch {
			case errors.Is(err, fs.ErrNotExist):
			case err != nil:
				unit.err = errors.Join(unit.err, err)
			default:
				unit.environ = append(unit.environ, settings.ParseEnvironmentFile(string(text))...)
				unit.files = append(unit.files, file)
			}
		}
	}
	return unit
}
