# `cmake --install BUILD --prefix PLACE`: the libraries and their headers for find_package(torpor), and the inspector.
# Components: development, tools and python (the module in a wheel).
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package ${CMAKE_INSTALL_LIBDIR}/cmake/torpor)
set(names base allocator offload kvcache blocks scheduler_state checkpoint engine delivery reference)
list(TRANSFORM names PREPEND torpor_ OUTPUT_VARIABLE libraries)
foreach(name ${names})
  set_target_properties(torpor_${name} PROPERTIES EXPORT_NAME ${name})
endforeach()
set_target_properties(torpor_flags PROPERTIES EXPORT_NAME flags)
add_custom_target(libraries DEPENDS ${libraries})
install(TARGETS torpor_flags ${libraries} EXPORT torpor
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}/torpor COMPONENT development
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/torpor)
# Install the headers of entry_points.txt, with which programs of others begin, and what these include. All others are
# internal.
set(entry_points ${CMAKE_CURRENT_LIST_DIR}/entry_points.txt)
file(STRINGS ${entry_points} open)
set(public)
while(open)
  list(POP_FRONT open header)
  if(NOT header IN_LIST public)
    list(APPEND public ${header})
    file(STRINGS ${PROJECT_SOURCE_DIR}/${header} lines REGEX "^#include \"")
    list(TRANSFORM lines REPLACE "^#include \"([^\"]+)\".*" "\\1")
    list(APPEND open ${lines})
  endif()
endwhile()
list(TRANSFORM public PREPEND ${PROJECT_SOURCE_DIR}/ OUTPUT_VARIABLE sources)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${entry_points} ${sources})
foreach(header ${public})
  cmake_path(GET header PARENT_PATH folder)
  install(FILES ${PROJECT_SOURCE_DIR}/${header} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/torpor/${folder}
    COMPONENT development)
endforeach()
install(EXPORT torpor NAMESPACE torpor:: FILE torporTargets.cmake DESTINATION ${package} COMPONENT development)
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/torporConfig.cmake.in ${PROJECT_BINARY_DIR}/torporConfig.cmake
  INSTALL_DESTINATION ${package})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/torporConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/torporConfig.cmake ${PROJECT_BINARY_DIR}/torporConfigVersion.cmake
  DESTINATION ${package} COMPONENT development)

# `tools/dev deb`: Debian's package of the inspector alone.
set(CPACK_GENERATOR DEB)
set(CPACK_COMPONENTS_ALL tools)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_PACKAGE_NAME torpor-tools)
set(CPACK_DEBIAN_TOOLS_PACKAGE_NAME torpor-tools)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION utils)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_MAINTAINER "The torpor developers <torpor@localhost>")
string(CONCAT CPACK_COMPONENT_TOOLS_DESCRIPTION "inspector of torpor's checkpoints\n"
  "Lists, verifies, compares and repairs checkpoints of LLM inference engines that torpor\n"
  "has put to sleep. Needs no engine, no GPU and no Python.")
set(CPACK_STRIP_FILES ON)
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
include(CPack)
