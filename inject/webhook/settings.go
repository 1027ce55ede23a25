package webhook

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"reflect"
	"sync"

	"github.com/nametap/nametap/inject"
)

// settings are the last usable settings of injection. The file is read for each pod, and for the metric.
type settings struct {
	file string // "" means that the settings are the defaults, and never change
	log  *slog.Logger

	mu      sync.Mutex
	cfg     inject.Config
	usable  bool   // cfg was read from the file, or there is no file
	problem string // why the file cannot be used; "" if it can
}

// current returns the settings. If the file could never be used, they are the defaults, and problem says why.
func (s *settings) current() (cfg inject.Config, problem string) {
	if s.file != "" {
		s.update(s.read())
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.usable {
		problem = s.problem
	}
	return s.cfg, problem
}

// failing returns 1 while the file cannot be used, otherwise 0.
func (s *settings) failing() float64 {
	_, _ = s.current()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.problem != "" {
		return 1
	}
	return 0
}

// read reads the file.
func (s *settings) read() (cfg inject.Config, err error) {
	text, err := os.ReadFile(s.file)
	if err != nil {
		return cfg, fmt.Errorf("settings of injection: %w (--inject-config)", err)
	}
	if cfg, err = inject.ParseConfig(text); err == nil {
		err = errors.Join(cfg.Check(), cfg.ReadRootCAs())
	}
	if err != nil {
		return cfg, fmt.Errorf("settings of injection %q: %w (--inject-config)", s.file, err)
	}
	return cfg, nil
}

// update uses the result of read. While the file cannot be used, the previous settings stay, if there are any.
func (s *settings) update(cfg inject.Config, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		if s.problem != err.Error() {
			text := "the previous settings of injection stay in use"
			if !s.usable {
				text = "there are no settings of injection, and pods that should have the agent are refused; names are served all the same"
			}
			s.log.Error(text, "error", err)
		}
		s.problem = err.Error()
		return
	}
	if s.problem != "" || !s.usable || !reflect.DeepEqual(cfg, s.cfg) {
		s.log.Info("the settings of injection are in use", "file", s.file, "mode", cfg.Mode)
	}
	s.cfg, s.usable, s.problem = cfg, true, ""
}
